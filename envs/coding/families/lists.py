"""Problems on lists of integers."""

from .family import family


@family(k=(0, 1, 5))
def total_plus(numbers: list[int], *, k: int) -> int:
    """Return the sum of the numbers plus {k}."""
    return sum(numbers) + k


@family(k=(2, 3, 4))
def sum_of_divisible(numbers: list[int], *, k: int) -> int:
    """Return the sum of the numbers that are divisible by {k}."""
    return sum(number for number in numbers if number % k == 0)


@family(k=(-3, 0, 3, 5))
def count_above(numbers: list[int], *, k: int) -> int:
    """Return how many of the numbers are greater than {k}."""
    return sum(number > k for number in numbers)


@family(k=(-2, 2, 3))
def scale_all(numbers: list[int], *, k: int) -> list[int]:
    """Return a list of the numbers, each multiplied by {k}."""
    return [number * k for number in numbers]


@family(k=(2, 3, 4))
def largest(numbers: list[int], *, k: int) -> list[int]:
    """Return the {k} largest of the numbers, the largest first; all of them if there are fewer."""
    return sorted(numbers, reverse=True)[:k]


@family(k=(2, 3, 4))
def every(numbers: list[int], *, k: int) -> list[int]:
    """Return the numbers at the positions 0, {k}, twice {k}, and so on."""
    return numbers[::k]


@family(k=(2, 3, 4))
def rotate(numbers: list[int], *, k: int) -> list[int]:
    """Return the list rotated to the left by {k} places; the first number goes to the end."""
    if not numbers:
        return []
    start = k % len(numbers)
    return numbers[start:] + numbers[:start]


@family(k=(2, 3, 4))
def chunks(numbers: list[int], *, k: int) -> list[list[int]]:
    """Return the numbers in lists of {k}, in order; the last list may be shorter."""
    return [numbers[start : start + k] for start in range(0, len(numbers), k)]


@family(k=(2, 3))
def seen_often(numbers: list[int], *, k: int) -> list[int]:
    """Return the numbers that occur at least {k} times, each once, in ascending order."""
    return sorted({number for number in numbers if numbers.count(number) >= k})


@family(k=(2, 3, 4))
def best_window(numbers: list[int], *, k: int) -> int:
    """Return the largest sum of {k} neighbouring numbers; 0 if there are fewer than {k} numbers."""
    sums = [sum(numbers[start : start + k]) for start in range(len(numbers) - k + 1)]
    return max(sums, default=0)


@family(k=(5, 10, 15))
def running_total(numbers: list[int], *, k: int) -> list[int]:
    """Return the running totals of the numbers, starting from {k}: the first is {k} plus the first
    number. An empty list gives an empty list.
    """
    totals = []
    for number in numbers:
        k += number
        totals.append(k)
    return totals


@family(k=(0, 3, 5))
def pairs_with_sum(numbers: list[int], *, k: int) -> int:
    """Return how many pairs of positions i < j hold numbers whose sum is {k}."""
    return sum(a + b == k for i, a in enumerate(numbers) for b in numbers[i + 1 :])
