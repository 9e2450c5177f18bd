"""Mistakes in the exercises of phase 04."""

from tests.course.slips import Slip

SLIPS = {
    "04.1": (
        "ahead-of-itself",
        "last-token-computed",
        "placeholders-forgotten",
        "09:placeholder-not-counted",
        "07:every-chunk-sampled",
        "07:chunks-not-in-flight",
        Slip(
            "takes-a-part",
            "return count if 0 < count <= budget and",
            "return min(count, budget) if 0 < count and",
            "Computes a part of a prompt, which this phase's step cannot.",
        ),
        Slip(
            "drafts-do-not-count",
            "= end = start + count + len(drafts)",
            "= end = start + count",
            "Does not advance by drafts.",
        ),
    ),
    "04.2": (
        "lookup-ignored",
        "budget-not-lowered",
        "back-while-in-flight",
        "aborted-still-in-line",
        "07:anybody-passes",
        Slip(
            "last-of-those-that-run",
            "insort(self.running, request, key=by_rank)",
            "self.running.append(request)",
            "Puts newcomers at the end, whatever their rank.",
        ),
    ),
    "04.3": (
        "batch-after-batch",
        "newcomers-first",
        "nothing-reserved",
        Slip(
            "budget-for-everyone",
            "            budget -= count + len(drafts)\n",
            "",
            "Lets each request have the whole budget.",
        ),
        "05:room-of-the-victim-given-away",
    ),
    "04.4": (
        "never-committed",
        "failed-steps-committed",
        "ended-requests-committed",
        "first-sample-committed",
        "first-sample-lands",
        "drafts-committed",
        "drafts-stay-computed",
    ),
    "04.5": (
        "preemptions-uncounted",
        "preempted-goes-last",
        "preempted-stays-computed",
        "room-is-kept",
        "row-before-room",
        "row-is-kept",
    ),
}
