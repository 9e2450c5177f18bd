"""Mistakes in phase 07, chunked prefill. The first is planted on every run of the test suite."""

from tests.planted.planting import Bug

SCHEDULER = "phases/07_chunked_prefill/chunked_prefill/scheduler.py"
PAGED = "phases/05_paged_cache/paged_cache/scheduler.py"
BASE = "phases/04_continuous/continuous/scheduler.py"
ENGINE = "phases/04_continuous/continuous/engine.py"

BUGS = (
    Bug(
        "prompts-first",
        SCHEDULER,
        "return decodes + prompts",
        "return prompts + decodes",
        "Serves prompts before decodes.",
    ),
    Bug(
        "nothing-kept",
        SCHEDULER,
        "kept = max(1, self.step_tokens // 4)",
        "kept = 0",
        "Keeps nothing for prompts, which starve behind decodes.",
    ),
    Bug(
        "kept-rounded-up",
        SCHEDULER,
        "kept = max(1, self.step_tokens // 4)",
        "kept = -(-self.step_tokens // 4)",
        "Rounds the quarter up.",
    ),
    Bug(
        "nothing-kept-of-three",
        SCHEDULER,
        "kept = max(1, self.step_tokens // 4)",
        "kept = self.step_tokens // 4",
        "Keeps nothing of a budget below 4.",
    ),
    Bug(
        "always-kept",
        SCHEDULER,
        "(self._kept if many else 0)",
        "kept",
        "Keeps a quarter for prompts when there are none.",
    ),
    Bug(
        "kept-for-who-cannot-begin",
        SCHEDULER,
        "prompts or self._newcomer()",
        "prompts or self._head() is not None",
        "Keeps a quarter for a request that has no row or no room.",
    ),
    Bug(
        "kept-for-those-that-run",
        SCHEDULER,
        "prompts or self._newcomer()",
        "prompts",
        "Keeps nothing for the waiting line, so that nobody ever begins.",
    ),
    Bug(
        "full-is-not-many",
        SCHEDULER,
        "many = len(decodes) > self.step_tokens - kept",
        "many = len(decodes) > self.step_tokens",
        "Keeps nothing while the decodes just fill the budget.",
    ),
    Bug(
        "no-turns",
        SCHEDULER,
        "            decodes = decodes[turn:] + decodes[:turn]\n",
        "",
        "Serves the same decodes in every step.",
    ),
    Bug(
        "turn-of-the-last-again",
        SCHEDULER,
        "turn = bisect_right(",
        "turn = -1 + bisect_right(",
        "Begins the next turn with who was served last.",
    ),
    Bug(
        "decodes-without-limit",
        SCHEDULER,
        "if self._decodes_left == 0 or known",
        "if known",
        "Serves decodes beyond their part of the budget.",
    ),
    Bug(
        "last-token-computed",
        SCHEDULER,
        "if self._decodes_left == 0 or known >= request.limit:",
        "if self._decodes_left == 0:",
        "Computes the last token, after which nothing comes.",
    ),
    Bug(
        "ahead-of-itself",
        SCHEDULER,
        "count = max(0, min(behind, budget, self.chunk_tokens))",
        "count = min(behind, budget, self.chunk_tokens)",
        "Schedules a request whose drafts are still on their way, with fewer tokens than none.",
    ),
    Bug(
        "chunks-without-limit",
        SCHEDULER,
        "min(behind, budget, self.chunk_tokens)",
        "min(behind, budget)",
        "Gives one prompt the whole budget.",
    ),
    Bug(
        "forks-too-soon",
        SCHEDULER,
        "        if request.siblings and request.in_flight and count == behind:\n"
        "            return 0  # they fork when all earlier chunks are known to be computed\n",
        "",
        "Forks siblings while an earlier chunk may still fail.",
    ),
    Bug(
        "decodes-let-pass",
        SCHEDULER,
        "        if not request.prefilling:\n            return False\n",
        "",
        "Makes decodes wait for prompts of smaller rank.",
    ),
    Bug(
        "prompts-never-let-pass",
        SCHEDULER,
        "return head is not None and head.rank < request.rank",
        "return False",
        "Finishes a prompt that has begun before anybody may begin.",
    ),
    Bug(
        "anybody-passes",
        BASE,
        "            if before is not None and request.rank >= before:\n                break\n",
        "",
        "Lets the whole line pass a prompt that yields to its head.",
    ),
    Bug(
        "end-of-the-queue-preempted",
        PAGED,
        "victim = max((request, *queue[at:]), key=by_rank)",
        "victim = queue[-1] if at < len(queue) else request",
        "Takes the end of the queue for the least important; decodes come first here.",
    ),
    Bug(
        "needy-never-preempted",
        PAGED,
        "victim = max((request, *queue[at:]), key=by_rank)",
        "victim = max(queue[at:], key=by_rank, default=request)",
        "Preempts anybody before the one who needs room.",
    ),
    Bug(
        "served-are-preempted",
        PAGED,
        "victim = max((request, *queue[at:]), key=by_rank)",
        "victim = max((request, *queue), key=by_rank)",
        "Preempts a request that is in the step already.",
    ),
    Bug(
        "aborted-siblings-fork",
        PAGED,
        "        siblings = [sibling for sibling in request.siblings if sibling.finish_reason is None]\n",
        "        siblings = request.siblings\n",
        "Forks siblings that were aborted while the prompt was computed.",
    ),
    Bug(
        "rows-of-siblings-lost",
        PAGED,
        "        for sibling in request.siblings:\n"
        "            if sibling.row >= 0:\n"
        "                self.rows.release(sibling)\n",
        "",
        "Preempts a prompt without the rows of its siblings.",
    ),
    Bug(
        "siblings-survive-a-failure",
        ENGINE,
        "(work.request, *work.takers, *work.request.siblings)",
        "(work.request, *work.takers)",
        "Ends a prompt that failed, and not the samples that wait for it.",
    ),
    Bug(
        "every-chunk-sampled",
        BASE,
        "if end < len(request.tokens) + request.placeholders:",
        "if end < 0:",
        "Samples a token after every chunk.",
    ),
    Bug(
        "chunks-not-in-flight",
        BASE,
        "            request.in_flight += 1\n            return Work(request, request.row, start, count)\n",
        "            return Work(request, request.row, start, count)\n",
        "Does not count the steps of chunks as in flight.",
    ),
    Bug(
        "budget-of-one",
        SCHEDULER,
        "if step_tokens < 2:",
        "if step_tokens < 1:",
        "Accepts a budget of 1, of which prompts or decodes get nothing.",
    ),
)
