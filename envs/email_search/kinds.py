"""The kinds of facts in a mailbox, and the questions about them.

A fact has an answer and keys, which identify it among the facts of its kind. A text may contain the
keys and `{answer}`; `updates` are texts of a later message that replaces the first answer.
"""

from dataclasses import dataclass

AMOUNT, DATE, NUMBER, PERSON = "amount", "date", "number", "person"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fact. `answer` is one of the constants above or the name of a vocabulary pool."""

    answer: str
    keys: tuple[str, ...]
    question: str
    subjects: tuple[str, ...]
    texts: tuple[str, ...]
    updates: tuple[str, ...]


KINDS = (
    Kind(
        answer=AMOUNT,
        keys=("company", "item"),
        question="How much does {company} charge for {item}?",
        subjects=("Invoice for {item}", "{company}: your order"),
        texts=(
            "{company} sent the invoice for {item}. The total is {answer}.",
            "For {item}, {company} charges {answer}, payable within a month.",
        ),
        updates=(
            "{company} has corrected the invoice for {item}: the total is now {answer}.",
            "After my complaint, {company} charges {answer} for {item}.",
        ),
    ),
    Kind(
        answer=DATE,
        keys=("company", "item"),
        question="On which date will {company} deliver {item}?",
        subjects=("Delivery of {item}", "{company}: shipping notice"),
        texts=(
            "{company} will deliver {item} on {answer}. Someone has to sign for it.",
            "The delivery of {item} by {company} is planned for {answer}.",
        ),
        updates=(
            "{company} is late with {item}: the delivery moves to {answer}.",
            "New delivery date for {item} from {company}: {answer}.",
        ),
    ),
    Kind(
        answer=DATE,
        keys=("project", "topic"),
        question="On which date is the {topic} of project {project}?",
        subjects=("{project}: {topic}", "Invitation: {topic}"),
        texts=(
            "the {topic} of {project} takes place on {answer}. An agenda will follow.",
            "I have put the {topic} of {project} on {answer}, as most of us are free.",
        ),
        updates=(
            "we have to move the {topic} of {project} to {answer}.",
            "The {topic} of {project} is postponed; the new date is {answer}.",
        ),
    ),
    Kind(
        answer="room",
        keys=("project", "topic"),
        question="In which room does the {topic} of project {project} take place?",
        subjects=("Room for the {topic}", "{project}: where we meet"),
        texts=(
            "I have booked room {answer} for the {topic} of {project}.",
            "The {topic} of {project} takes place in room {answer}.",
        ),
        updates=(
            "Our room was taken: the {topic} of {project} is now in room {answer}.",
            "change of room for the {topic} of {project}: please come to {answer}.",
        ),
    ),
    Kind(
        answer=PERSON,
        keys=("project",),
        question="Who leads project {project}?",
        subjects=("Lead of {project}", "{project}: who does what"),
        texts=(
            "from next week on, {answer} leads project {project}.",
            "Questions about {project} go to {answer}, who leads the project.",
        ),
        updates=(
            "There is a change at {project}: {answer} takes over the lead.",
            "{answer} is the new lead of project {project}.",
        ),
    ),
    Kind(
        answer=AMOUNT,
        keys=("project",),
        question="What is the budget of project {project}?",
        subjects=("Budget of {project}", "{project}: figures"),
        texts=(
            "the board has approved {answer} as the budget of {project}.",
            "For {project} we have a budget of {answer} this year.",
        ),
        updates=(
            "The budget of {project} was revised: it is {answer} now.",
            "after the last round, {project} has a budget of {answer}.",
        ),
    ),
    Kind(
        answer="hotel",
        keys=("person", "city"),
        question="In which hotel does {person} stay in {city}?",
        subjects=("Trip to {city}", "Booking confirmation, {city}"),
        texts=(
            "{person} will stay at {answer} in {city}. Breakfast is included.",
            "The hotel for {person} in {city} is booked: {answer}.",
        ),
        updates=(
            "the hotel in {city} is overbooked; {person} stays at {answer} instead.",
            "New booking for {person} in {city}: {answer}.",
        ),
    ),
    Kind(
        answer=DATE,
        keys=("person", "city"),
        question="On which date does {person} travel to {city}?",
        subjects=("Travel plans, {city}", "Flights to {city}"),
        texts=(
            "{person} flies to {city} on {answer}, in the early morning.",
            "The journey of {person} to {city} is fixed for {answer}.",
        ),
        updates=(
            "The flight to {city} was cancelled. {person} travels on {answer}.",
            "{person} had to rebook and goes to {city} on {answer}.",
        ),
    ),
    Kind(
        answer=NUMBER,
        keys=("person",),
        question="What is the phone extension of {person}?",
        subjects=("Phone list", "How to reach {person}"),
        texts=(
            "{person} can be reached at extension {answer}.",
            "The extension of {person} is {answer}.",
        ),
        updates=(
            "{person} has moved desks; the new extension is {answer}.",
            "Please note the new extension of {person}: {answer}.",
        ),
    ),
    Kind(
        answer=NUMBER,
        keys=("item", "project"),
        question="How many units of {item} were ordered for project {project}?",
        subjects=("Order for {project}", "{project}: supplies"),
        texts=(
            "I have ordered {answer} units of {item} for {project}.",
            "For {project} we have ordered {item}: {answer} units.",
        ),
        updates=(
            "I have changed the order of {item} for {project} to {answer} units.",
            "It will be {answer} units of {item} for {project}, not what I wrote before.",
        ),
    ),
)
