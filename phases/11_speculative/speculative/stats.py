"""Counts of drafts and accepted drafts, by position, and of tokens a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from continuous.work import Work


@dataclass
class SpeculationStats:
    """Counts of verified and accepted drafts in finished steps.

    steps: times that a request's drafts were verified.
    drafted, accepted: number of drafts by position; the first draft of a request in a step has position 0.
    marks: which output tokens were accepted drafts, as indices in the output, by the request's (`index`,
        `sample`): the number of its prompt, and of its completion; None: not recorded.
    """

    steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    marks: dict[tuple[int, int], set[int]] | None = None

    def count(self, work: Work, accepted: int) -> None:
        """Count the drafts of one request that a step verified; drafts behind the request's end do not count.

        work: the request's tokens in the step. accepted: how many of its drafts the model confirmed.
        """
        drafts = len(work.drafts)
        tried = drafts if work.request.finish_reason is None else accepted
        self.steps += 1
        for counts in (self.drafted, self.accepted):
            counts += [0] * (tried - len(counts))
        for place in range(tried):
            self.drafted[place] += 1
            self.accepted[place] += place < accepted
        if self.marks is not None:
            request = work.request
            first = work.start + work.count - drafts - request.prompt_len
            self.marks.setdefault((request.index, request.sample), set()).update(
                range(first, first + accepted)
            )

    @property
    def acceptance(self) -> float:
        """Return the share of verified drafts that were accepted, 0 to 1; 0 if there were none."""
        return sum(self.accepted) / sum(self.drafted) if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Return the mean tokens that a request gets in a step with drafts: the accepted and one more."""
        return 1 + sum(self.accepted) / self.steps if self.steps else 1.0

    def lines(self) -> list[str]:
        """Return the statistics as lines of text: one for all drafts, then one for each position."""
        if not self.drafted:
            return ["speculation: nothing was drafted"]
        most = max(self.drafted)
        return [
            f"speculation: {sum(self.drafted):,} drafts in {self.steps:,} steps, "
            f"{self.acceptance:.0%} accepted, {self.tokens_per_step:.2f} tokens a step",
            *(
                f"  draft {place + 1:>2}: {right / drafted:>4.0%} of {drafted:,} accepted  "
                f"{'█' * round(30 * right / most)}{'░' * round(30 * (drafted - right) / most)}"
                for place, (drafted, right) in enumerate(
                    zip(self.drafted, self.accepted, strict=True)
                )
            ),
        ]
