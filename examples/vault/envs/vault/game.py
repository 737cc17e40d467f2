"""The rules: where the code lies, and what a call answers."""

import random

ACTIVITIES = {
    "kitchen": ("frying eggs", "baking bread", "peeling potatoes"),
    "library": ("reading a novel", "looking for a dictionary", "sorting books"),
    "garage": ("repairing the car", "changing a tyre", "pumping up the bicycle"),
    "garden": ("watering the roses", "mowing the lawn", "planting a tree"),
    "bedroom": ("falling asleep", "making the bed", "waking up"),
    "bathroom": ("taking a shower", "brushing teeth", "washing hair"),
}
HELD_OUT = {  # of the split `eval`
    "kitchen": ("cooking soup", "washing the dishes", "slicing onions", "boiling water"),
    "library": ("reading poems", "returning a book", "reading a magazine", "studying an atlas"),
    "garage": ("washing the car", "parking the car", "mending a bicycle", "filling the tank"),
    "garden": ("picking flowers", "cutting the hedge", "sowing grass", "digging up weeds"),
    "bedroom": ("changing the pillows", "having a nap", "dreaming", "folding the blanket"),
    "bathroom": ("having a bath", "washing hands", "shaving", "looking for the soap"),
}
NUM_CALLS = 3
NUM_TASKS = {"train": 1000, "eval": 200}


class OutOfTurnError(RuntimeError):
    """A call before the start or after the end of a game."""


class Game:
    """One search for the code, which ends when the vault is open or no call is left."""

    def __init__(self, split: str, index: int | None, seed: int | None) -> None:
        """Raises ValueError for a split, index or seed that does not exist."""
        if split not in tuple(NUM_TASKS):  # a tuple, because a client may send unhashable values
            raise ValueError(f"split must be one of {', '.join(NUM_TASKS)}, got {split!r}")
        if index is None:
            if seed is not None and type(seed) is not int:
                raise ValueError(f"seed must be an integer or null, got {seed!r}")
            index = random.Random(seed).randrange(NUM_TASKS[split])
        last = NUM_TASKS[split] - 1
        if type(index) is not int or not 0 <= index <= last:
            raise ValueError(f"index must be an integer from 0 to {last}, got {index!r}")
        chance = random.Random(f"{split}/{index}")
        self._room = chance.choice(list(ACTIVITIES))
        self.activity = chance.choice((HELD_OUT if split == "eval" else ACTIVITIES)[self._room])
        self._code = chance.randint(100, 999)
        self.calls_left = NUM_CALLS
        self.is_open = False

    @property
    def is_over(self) -> bool:
        """Return whether the vault is open or no call is left."""
        return self.is_open or not self.calls_left

    def look(self, room: str) -> str:
        """Return what lies in a room. Raises OutOfTurnError."""
        self.spend_call()
        return f"A note: {self._code}." if room == self._room else "Nothing here."

    def unlock(self, code: int) -> str:
        """Try a code. Raises OutOfTurnError."""
        self.spend_call()
        self.is_open = code == self._code
        return "The vault is open." if self.is_open else "The vault stays locked."

    def spend_call(self) -> None:
        """Count a call. Raises OutOfTurnError."""
        if self.is_over:
            raise OutOfTurnError("The game is over. Reset to start another.")
        self.calls_left -= 1
