"""Images in observations: found at one door, kept as files, and notes in what a model reads."""

import base64
import io
import json
import warnings
from typing import Any

import PIL.Image
import pytest

from openenv_pipe.environments import images
from openenv_pipe.environments.adapters.templates import (
    compile_template,
    observation_message,
    observation_text,
    render_message,
)
from openenv_pipe.environments.images import find_references, with_references
from openenv_pipe.errors import RunFolderError
from openenv_pipe.runs.episodes import episodes_path, read_episodes, write_episodes
from openenv_pipe.runs.transcript import in_markdown, transcript
from openenv_pipe.types import Episode, Finish, Group, Image, Status, Step, Task, Turn


def file_of(opened: PIL.Image.Image, kind: str = "PNG", **options: Any) -> str:
    """Return an image as base64 of a file."""
    file = io.BytesIO()
    opened.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def gradient(width: int = 64, height: int = 48, mode: str = "RGB") -> PIL.Image.Image:
    data = bytes(index * 7 % 256 for index in range(width * height * len(mode)))
    return PIL.Image.frombytes(mode, (width, height), data)


def rows_of(image: PIL.Image.Image) -> list:
    """Return the pixels as nested lists, as numpy's `tolist` does."""
    data, (width, height) = image.tobytes(), image.size
    if image.mode == "L":
        return [list(data[row * width : (row + 1) * width]) for row in range(height)]
    pixels = [list(data[start : start + 3]) for start in range(0, len(data), 3)]
    return [pixels[row * width : (row + 1) * width] for row in range(height)]


RGB, GRAY = gradient(), gradient(mode="L")
SIZE = "64 x 48 pixels"
BOMB = base64.b64encode(
    base64.b64decode(file_of(PIL.Image.new("L", (8, 8))))[:16] + (2**15).to_bytes(4) * 2 + bytes(90)
).decode()


def webp_of(kind: str, side: int) -> str:
    """Return the beginning of a WebP file whose image has so many rows and columns."""
    sides = {
        "VP8 ": bytes(6) + side.to_bytes(2, "little") * 2,
        "VP8L": b"/" + ((side - 1) * (1 + 2**14)).to_bytes(4, "little") + bytes(5),
        "VP8X": bytes(4) + (side - 1).to_bytes(3, "little") * 2,
    }[kind]
    file = b"RIFF" + bytes([200, 0, 0, 0]) + b"WEBP" + kind.encode() + bytes(4) + sides
    return base64.b64encode(file + bytes(60)).decode()


SAME = [
    ("rows", rows_of(RGB)),
    ("png", file_of(RGB)),
    ("url", f"data:image/png;base64,{file_of(RGB)}"),
    ("lines", "\n".join(file_of(RGB)[n : n + 76] for n in range(0, 9999, 76)).strip()),
]
NO_IMAGES = [
    "iVBORw0KGgo",
    "iVBORw0KGgo is how a PNG file begins, and this sentence is no such file: it has a colon.",
    "iVBORw0KGgo" + "A" * 100,
    "iVBORw0KGgo" + "=" * 3 + "A" * 90,
    "data:image/png;base64,",
    "data:image/webp;base64," + "a" * 100,
    file_of(RGB)[: len(file_of(RGB)) // 2],
    BOMB,
    *(webp_of(kind, 2**13) for kind in ("VP8 ", "VP8L", "VP8X")),
    webp_of("VP8L", 64),
    webp_of("VP8L", 64).replace("VlA4TA", "VlA4TB"),
    "a" * 500,
    [[0, 1], [2, 3]],
    [[number % 16 for number in range(40)]] * 40,  # a board
    [[[9, 9, 9]] * 25] * 25,  # a board of three layers
    [[[9, 9, 9]] * 40] * 39 + [[[9, 9, 9]] * 39],
    [[[9, 9, 256]] * 40] * 40,
    [[[9, 9, 0.5]] * 40] * 40,
    [[[9, 9, "9"]] * 40] * 40,
    [[["9", "9", "9"]] * 40] * 40,
    [[True, False] * 20] * 40,
    [list("no image, but as many letters in rows.")] * 40,
    [[{"a": 1, "b": 2, "c": 3}] * 40] * 40,
    7,
    None,
]


async def taken(value):
    return (await with_references({"screen": value}))["screen"]


@pytest.mark.parametrize(("form", "value"), SAME)
async def test_equal_images_have_one_name_in_whatever_form_they_come(form, value):
    image = await taken(value)
    assert isinstance(image, Image)
    assert image == await taken(rows_of(RGB))
    assert (image["width"], image["height"]) == RGB.size
    with PIL.Image.open(io.BytesIO(image.png)) as file:
        assert file.format == "PNG" and file.mode == "RGB" and file.tobytes() == RGB.tobytes()


async def test_other_forms_of_images_are_read():
    gray = await taken(rows_of(GRAY))
    assert (
        gray == await taken(file_of(GRAY)) == await taken([[[n] for n in r] for r in rows_of(GRAY)])
    )
    assert gray != await taken(rows_of(RGB))
    for kind in ("JPEG", "GIF", "WEBP"):
        assert isinstance(await taken(file_of(RGB, kind)), Image)
    assert await taken(file_of(RGB, "WEBP", lossless=True)) == await taken(file_of(RGB))
    moving = file_of(RGB, "WEBP", save_all=True, append_images=[gradient(mode="RGB").rotate(90)])
    assert isinstance(await taken(moving), Image)


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exif": b"Exif\0\0", "quality": 9}])
async def test_the_header_of_a_webp_file_bounds_it(options, monkeypatch):
    """Each of the three kinds of first chunk has the size in a place of its own."""
    text = file_of(RGB, "WEBP", **options)
    assert isinstance(await taken(text), Image)
    monkeypatch.setattr(images, "MAX_PIXELS", 64 * 48)
    assert isinstance(await taken(text), Image)
    monkeypatch.setattr(images, "MAX_PIXELS", 64 * 48 - 1)
    assert await taken(text) == text


async def test_flat_lists_and_images_deep_inside_are_read():
    gray = await taken(rows_of(GRAY))
    flat = {"screen": list(GRAY.tobytes()), "screen_shape": [48, 64]}
    assert (await with_references(flat))["screen"] == gray
    flat = {"screen": list(RGB.tobytes()), "screen_shape": [48, 64, 3]}
    assert (await with_references(flat))["screen"] == await taken(rows_of(RGB))
    assert isinstance((await taken({"views": [{"left": file_of(RGB)}]}))["views"][0]["left"], Image)
    black = [[[0, 0, 0]] * 40] * 40
    assert isinstance(await taken(black), Image)


@pytest.mark.parametrize("value", NO_IMAGES, ids=range(len(NO_IMAGES)))
async def test_what_is_no_image_or_cannot_be_read_stays_as_it_is(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow warns of large images
        assert await taken([value]) == [value]
    flat = {"screen": [1, 2, 3] * 99, "screen_shape": value}
    assert await with_references(flat) == flat


async def test_what_is_decoded_is_bounded(monkeypatch):
    many = await taken([file_of(GRAY)] * (images.MAX_IMAGES + 2))
    assert [isinstance(each, Image) for each in many].count(True) == images.MAX_IMAGES
    monkeypatch.setattr(images, "ENOUGH_PIXELS", 64 * 48 + 1)
    few = await taken([file_of(GRAY)] * 4)
    assert [isinstance(each, Image) for each in few] == [True, True, False, False]
    monkeypatch.setattr(images, "MAX_PIXELS", 64 * 48 - 1)
    for _, value in SAME:
        assert await taken(value) == value


async def test_a_model_reads_the_note_wherever_the_image_is():
    observation = await with_references({"frames": [{"image": file_of(RGB)}], "score": 3})
    template = compile_template("first", "{{ frames[0].image }} {{ score }}")
    message = render_message("user", template, observation)
    note = f"[image 1: {SIZE}]"
    assert message["content"] == f"{note} 3"
    assert message["images"] == {note: observation["frames"][0]["image"]}
    plain = observation_message("user", None, observation, observation_text)
    assert note in plain["content"] and "images/" not in plain["content"]
    hidden = render_message("user", compile_template("first", "{{ score }}"), observation)
    assert hidden == {"role": "user", "content": "3"}


async def test_a_image_that_cannot_be_read_is_a_note_of_its_kind():
    note = observation_message("user", None, {"shot": "data:image/webp;base64," + "a" * 100}, str)
    assert "[image: webp, 75 bytes]" in note["content"] and "images" not in note
    long_text = "iVBORw0KGgo" + " " * 1_000_000 + "!"  # takes hours if it is matched carelessly
    assert observation_message("user", None, {"text": long_text}, str)["content"]


async def test_what_looks_like_a_reference_shows_no_file():
    forged = {"image": f"images/{'0' * 32}.png", "width": 64, "height": 48}
    message = observation_message("user", None, {"shot": forged}, observation_text)
    assert SIZE in message["content"] and "images" not in message
    for path in ("images/../run.json", "/etc/passwd", f"images/{'0' * 32}.png\n"):
        assert find_references({"shot": forged | {"image": path}}) == []


async def episodes_with_images() -> list[Group]:
    task = Task(id="train/0", split="train", index=0, seed=0)
    members = []
    for member in range(2):
        first = await with_references({"screen": rows_of(RGB), "score": 0})
        second = await with_references({"screen": [file_of(GRAY)], "score": 1})
        turn = Turn(
            prompt_ids=[1],
            completion_ids=[2],
            logprobs=[0.0],
            finish=Finish.STOP,
            policy_versions=[0],
            reply="up",
            messages=[observation_message("user", None, first, observation_text)],
            steps=[Step(action={"move": "up"}, observation=second, reward=1.0)],
        )
        members.append(
            Episode(
                task=task,
                member=member,
                seed=member,
                first_observation=first,
                turns=[turn],
                status=Status.DONE,
            )
        )
    return [Group(id="g", task=task, episodes=members)]


async def test_episode_files_name_images_which_are_stored_once(tmp_path):
    (tmp_path / "episodes").mkdir()
    groups = await episodes_with_images()
    path = episodes_path(tmp_path, 1)
    write_episodes(path, groups)
    files = sorted(each.name for each in (tmp_path / "images").iterdir())
    screen = groups[0].episodes[0].first_observation["screen"]
    assert len(files) == 2 and screen["image"].removeprefix("images/") in files
    assert len(path.read_bytes()) < 1000
    before = path.read_bytes(), [(tmp_path / "images" / each).stat() for each in files]
    read = read_episodes(path)
    assert read == groups
    write_episodes(path, read)  # a resumed run writes the same again
    assert before == (
        path.read_bytes(),
        [(tmp_path / "images" / each).stat() for each in files],
    )
    episode = read[0].episodes[0]
    (shown,) = episode.turns[0].messages[0]["images"].values()
    assert episode.first_observation["screen"].png == shown.png == screen.png


async def test_another_run_gets_the_images_that_its_episodes_name(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        (folder / "episodes").mkdir(parents=True)
    write_episodes(episodes_path(old, 1), await episodes_with_images())
    read = read_episodes(episodes_path(old, 1))
    write_episodes(episodes_path(new, 1), read)
    assert [each.read_bytes() for each in sorted((new / "images").iterdir())] == [
        each.read_bytes() for each in sorted((old / "images").iterdir())
    ]
    for each in [*(old / "images").iterdir(), *(new / "images").iterdir()]:
        each.unlink()
    with pytest.raises(RunFolderError, match=r"cannot read .*/old/images/"):
        write_episodes(episodes_path(new, 1), read)


async def test_transcripts_name_the_files_and_pages_show_them():
    (group,) = await episodes_with_images()
    episode = group.episodes[0]
    path = episode.first_observation["screen"]["image"]
    assert f"screen: [{SIZE}: {path}]" in transcript(episode)
    page = in_markdown(episode, "..")
    assert f"![image 1](../{path}) ![image 2](../images/" in page
    many = [
        await with_references({"screen": file_of(gradient(64, height))}) for height in range(40, 47)
    ]
    episode.turns[0].steps = [Step(action={}, observation=each) for each in many]
    assert page.count("![") == 2 and in_markdown(episode, "..").count("![") == 4
    assert "(4 more)" in in_markdown(episode, "..")
    assert json.loads(json.dumps(many))[0]["screen"]["width"] == 64
