"""One episode: a problem, a limited number of attempts, and the reward of each attempt."""

from dataclasses import dataclass, field

from .problems import Problem
from .reply import MAX_CODE, MAX_REPLY, code_of
from .sandbox import box
from .scoring import Verdict, judge

OPEN, SOLVED, FAILED, STOPPED = "open", "solved", "failed", "stopped"
DEFAULT_ATTEMPTS, MAX_ATTEMPTS = 3, 8


@dataclass(kw_only=True, slots=True)
class Episode:
    """The state of an episode, in progress or ended. A violation of the sandbox ends it."""

    problem: Problem
    attempts: int
    attempt: int = 0
    status: str = OPEN
    best_score: float = 0.0
    verdict: Verdict = field(default_factory=Verdict)

    def submit(self, text: str) -> float:
        """Run one attempt. Return its improvement on the best score so far, less penalties.

        Blocks while the program runs. Raises SandboxError.
        """
        if self.status != OPEN:
            return 0.0
        self.verdict = self._judge(text)
        self.attempt += 1
        if self.verdict.is_solved:
            self.status = SOLVED
        elif self.verdict.is_violation:
            self.status = STOPPED
        elif self.attempt == self.attempts:
            self.status = FAILED
        improvement = max(0.0, self.verdict.score - self.best_score)
        self.best_score += improvement
        return round(improvement - self.verdict.penalty, 6)

    def _judge(self, text: str) -> Verdict:
        if len(text) > MAX_REPLY:
            return _too_long(text, MAX_REPLY)
        code = code_of(text)
        if len(code) > MAX_CODE:
            return _too_long(code, MAX_CODE)
        examples, hidden = self.problem.tests()
        batches = [[test.arguments for test in tests] for tests in (examples, hidden)]
        return judge(box.run(code, self.problem.function, batches), examples, hidden)


def _too_long(text: str, most: int) -> Verdict:
    message = f"{len(text)} characters are more than the {most} that are read"
    return Verdict(error="TooLong", message=message, feedback=message.capitalize() + ".")
