"""Mistakes in the exercises of phase 13."""

from tests.course.slips import Slip

SLIPS = {
    "13.1": (
        "abort-of-the-first-only",
        "refusal-kills-the-loop",
        Slip("told-again", "        self._ends = []\n", "", "Tells the same ends in every report."),
        Slip(
            "number-of-the-first",
            "number, place = request.index + request.sample, NO_TOKEN",
            "number, place = request.index, NO_TOKEN",
            "Sends all samples' tokens to the first.",
        ),
        Slip(
            "ended-stay",
            "                self.live.pop(number, None)\n",
            "",
            "Keeps requests that have ended.",
        ),
        Slip(
            "refuses-one",
            '[End(number, "refused", str(error)) for number in numbers]',
            '[End(numbers[0], "refused", str(error))]',
            "Tells the first of n samples only that they are refused.",
        ),
    ),
    "13.2": (
        "abort-not-sent",
        "death-is-silent",
        Slip("numbers-again", "        self._next += params.n\n", "", "Gives out the same numbers again."),
        Slip("told-after-the-end", "                del sinks[number]\n", "", "Tells of the end twice."),
        Slip(
            "still-called",
            "if self._sinks.pop(number, None) is not None]",
            "if number in self._sinks]",
            "Goes on calling sinks that nobody wants.",
        ),
        Slip(
            "all-have-left",
            "            if sink is None:  # it has left\n                continue\n",
            "            if sink is None:\n                break\n",
            "Stops dealing at the first who has left.",
        ),
    ),
    "13.3": (
        "stop-only-in-the-text",
        "end-token-shown",
        "unbounded-buffer",
        Slip(
            "taken-twice",
            "fresh, self.fresh = self.fresh, []",
            "fresh = self.fresh",
            "Sends what it has sent.",
        ),
        Slip("first-piece-only", "if len(fresh) == 1:", "if fresh:", "Loses all pieces but the first."),
        Slip(
            "logprobs-lost",
            "            whole.logprobs += piece.logprobs\n",
            "",
            "Loses log-probabilities of pieces that are put together.",
        ),
    ),
    "13.4": (
        "draining-takes-more",
        "queue-without-end",
        Slip(
            "one-too-few",
            "self.engine.in_flight + more > most",
            "self.engine.in_flight + more >= most",
            "Turns away whoever would be the last.",
        ),
        Slip(
            "rows-are-no-room",
            "ready.max_rows + self.limits.max_queue",
            "self.limits.max_queue",
            "Counts the queue and not the rows.",
        ),
        Slip(
            "seconds-for-milliseconds",
            "request.deadline_ms / 1e3 -",
            "request.deadline_ms -",
            "Takes milliseconds for seconds.",
        ),
        Slip(
            "as-late-as-one-likes",
            "return min(max(0.0, left), self.limits.max_seconds)",
            "return max(0.0, left)",
            "Lets a client choose any deadline.",
        ),
    ),
    "13.5": (
        Slip(
            "index-of-the-first",
            '[self._head, b"%d," % choice.index, body]',
            '[self._head, b"0,", body]',
            "Gives all choices the first one's index.",
        ),
        Slip("no-empty-line", 'parts.append(b"}\\n\\n")', 'parts.append(b"}\\n")', "Does not end an event."),
        Slip(
            "null-is-a-text",
            """b',"finish_reason":null}]'""",
            """b',"finish_reason":"null"}]'""",
            "Writes null as a text.",
        ),
        Slip(
            "usage-of-nobody",
            "elif self.usage:",
            "else:",
            "Says that the usage is null to a client that has not asked for it.",
        ),
        Slip("never-done", '+ b"\\n\\n" + DONE', '+ b"\\n\\n"', "Forgets [DONE] behind the usage."),
        Slip("done-without-usage", "if not self.usage:", "if True:", "Forgets the usage."),
    ),
    "13.6": (
        "body-read-before-it-is-weighed",
        "body-without-limit",
        Slip(
            "half-a-body",
            "message = await self._next()",
            "message = await self._receive()",
            "Takes what has come from a client that has left for the whole.",
        ),
        Slip("any-type", 'if kind != b"application/json":', "if False:", "Takes bodies of any type."),
        Slip(
            "last-part-only",
            'body += message.get("body", b"")',
            'body = bytearray(message.get("body", b""))',
            "Keeps the last part of a body.",
        ),
        Slip(
            "one-part-only",
            'if not message.get("more_body"):',
            "if True:",
            "Takes the first part for the whole.",
        ),
    ),
}
