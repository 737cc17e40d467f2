"""Problems on strings: lowercase words, separated by single spaces."""

from .family import family


@family(letter=("a", "e", "o"))
def count_letter(text: str, *, letter: str) -> int:
    """Return how often {letter} occurs in the text."""
    return text.count(letter)


@family(mark=("!", "?", "..."))
def shout(text: str, *, mark: str) -> str:
    """Return the text in capitals, followed by {mark}."""
    return text.upper() + mark


@family(k=(2, 3, 4))
def longer_words(text: str, *, k: int) -> list[str]:
    """Return the words of the text that have more than {k} letters, in order."""
    return [word for word in text.split() if len(word) > k]


@family(mark=("-", "_", "+"))
def join_reversed(text: str, *, mark: str) -> str:
    """Return the words of the text in reverse order, joined by {mark}."""
    return mark.join(reversed(text.split()))


@family(k=(1, 3, 13))
def shift_letters(text: str, *, k: int) -> str:
    """Return the text with every letter replaced by the one {k} places later in the alphabet, where
    a comes after z; spaces stay.
    """
    shifted = ""
    for letter in text:
        is_letter = letter.isalpha()
        shifted += chr((ord(letter) - ord("a") + k) % 26 + ord("a")) if is_letter else letter
    return shifted


@family(letters=("aeiou", "aei", "rst"))
def without(text: str, *, letters: str) -> str:
    """Return the text without the letters that are in {letters}."""
    return "".join(letter for letter in text if letter not in letters)


@family(k=(2, 3, 4))
def initials(text: str, *, k: int) -> str:
    """Return the first {k} letters of every word, joined without spaces."""
    return "".join(word[:k] for word in text.split())


@family(letter=("a", "n", "r"))
def starts_and_contains(text: str, *, letter: str) -> bool:
    """Return whether any word of the text contains {letter} after its first letter."""
    return any(letter in word[1:] for word in text.split())


@family(mark=("*", "#", "="))
def run_lengths(text: str, *, mark: str) -> str:
    """Return the text with every run of equal characters replaced by the character, {mark} and
    the length of the run.
    """
    parts = []
    start = 0
    for end in range(1, len(text) + 1):
        if end == len(text) or text[end] != text[start]:
            parts.append(f"{text[start]}{mark}{end - start}")
            start = end
    return "".join(parts)
