"""Problems on dictionaries."""

from .family import family


@family(k=(3, 5, 8))
def keys_above(scores: dict[str, int], *, k: int) -> list[str]:
    """Return the keys whose value is greater than {k}, in alphabetical order."""
    return sorted(key for key, value in scores.items() if value > k)


@family(k=(1, 2, 10))
def raise_values(scores: dict[str, int], *, k: int) -> dict[str, int]:
    """Return a dictionary with the same keys, and {k} added to every value."""
    return {key: value + k for key, value in scores.items()}


@family(default=("nobody", "none", "-"))
def best_key(scores: dict[str, int], *, default: str) -> str:
    """Return the key with the greatest value, the first of the alphabet where several have it, and
    {default} for an empty dictionary.
    """
    return min(scores, key=lambda key: (-scores[key], key), default=default)


@family(k=(2, 3, 4))
def count_by_length(words: list[str], *, k: int) -> dict[str, int]:
    """Return how often each of the words occurs, for words of at least {k} letters only."""
    counts = {}
    for word in words:
        if len(word) >= k:
            counts[word] = counts.get(word, 0) + 1
    return counts


@family(k=(2, 3))
def group_by_prefix(words: list[str], *, k: int) -> dict[str, list[str]]:
    """Return a dictionary from the first {k} letters of a word to the words that start with them,
    in their order.
    """
    groups = {}
    for word in words:
        groups.setdefault(word[:k], []).append(word)
    return groups


@family(k=(2, 3))
def merge(left: dict[str, int], right: dict[str, int], *, k: int) -> dict[str, int]:
    """Return a dictionary with the keys of both: the value is left's plus {k} times right's, where
    a missing value counts 0.
    """
    merged = dict(left)
    for key, value in right.items():
        merged[key] = merged.get(key, 0) + k * value
    return merged
