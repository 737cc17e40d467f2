"""Problems on integers."""

from .family import family


@family(k=(1, 7, 12))
def add(a: int, b: int, *, k: int) -> int:
    """Return the sum of a, b and {k}."""
    return a + b + k


@family(k=(2, 3, 9))
def scale(a: int, *, k: int) -> int:
    """Return {k} times a."""
    return k * a


@family(k=(2, 3, 7))
def is_divisible(n: int, *, k: int) -> bool:
    """Return whether n is divisible by {k}."""
    return n % k == 0


@family(k=(10, 20, 30))
def larger_of(a: int, b: int, *, k: int) -> int:
    """Return the largest of a, b and {k}."""
    return max(a, b, k)


@family(k=(5, 15, 25, 35))
def distance(n: int, *, k: int) -> int:
    """Return how far n is from {k}; it is never negative."""
    return abs(n - k)


@family(k=(2, 3, 8))
def digits_in_base(n: int, *, k: int) -> list[int]:
    """Return the digits of n in base {k}, the most significant first; 0 has the one digit 0."""
    digits = []
    while True:
        n, digit = divmod(n, k)
        digits.insert(0, digit)
        if n == 0:
            return digits


@family(k=(2, 3, 4))
def divisors_from(n: int, *, k: int) -> list[int]:
    """Return the divisors of n that are at least {k}, in ascending order; 0 has none."""
    return [divisor for divisor in range(k, n + 1) if n % divisor == 0]


@family(k=(3, 5, 6))
def sum_of_multiples(n: int, *, k: int) -> int:
    """Return the sum of all multiples of {k} from 0 to n, inclusive."""
    return sum(range(0, n + 1, k))


@family(words=(("Fizz", "Buzz"), ("Tick", "Tock"), ("Ping", "Pong")))
def fizz(n: int, *, words: tuple[str, str]) -> str:
    """Let (first, second) be {words}. Return first + second if n is divisible by 15, first if only
    by 3, second if only by 5, and otherwise n as a string.
    """
    text = words[0] * (n % 3 == 0) + words[1] * (n % 5 == 0)
    return text or str(n)
