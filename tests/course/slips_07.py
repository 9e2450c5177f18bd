"""Mistakes in the exercises of phase 07."""

from tests.course.slips import Slip

SLIPS = {
    "07.1": (
        "decodes-without-limit",
        "last-token-computed",
        "ahead-of-itself",
        "chunks-without-limit",
        "forks-too-soon",
        "09:one-token-too-many",
    ),
    "07.2": (
        "prompts-first",
        "nothing-kept",
        "kept-rounded-up",
        "nothing-kept-of-three",
        "always-kept",
        "kept-for-those-that-run",
        "kept-for-who-cannot-begin",
        "full-is-not-many",
        "no-turns",
        "turn-of-the-last-again",
    ),
    "07.3": (
        "decodes-let-pass",
        "prompts-never-let-pass",
        Slip(
            "equal-ranks-pass",
            "head.rank < request.rank",
            "head.rank <= request.rank",
            "Lets an equal rank pass.",
        ),
        Slip(
            "back-while-in-flight",
            " and not head.in_flight",
            "",
            "Keeps budget for a request whose token is on its way.",
        ),
        Slip(
            "anybody-passes",
            "head is not None and head.rank < request.rank",
            "head is not None",
            "Lets every newcomer pass.",
        ),
    ),
}
