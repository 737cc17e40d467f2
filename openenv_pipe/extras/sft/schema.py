"""The keys of `trainer.warm_start.source` for conversations."""

from typing import Literal

from pydantic import Field

from openenv_pipe.config.schema.source import SourceBlock


class ConversationsConfig(SourceBlock):
    """Conversations of a file or a data set (conf/trainer/warm_start/source/conversations.yaml)."""

    type: Literal["conversations"]
    path: str = Field(
        description="a file of JSON objects, one per line, with the messages of a conversation "
        "and, if there are any, its tools; or the id of a data set on the Hugging Face hub"
    )
    split: str = Field(description="split of the data set; slices such as train[:90%] work too")

    @property
    def title(self) -> str:
        return f"conversations of {self.path}"
