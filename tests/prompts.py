"""Varied prompts for comparing with the oracle: short, long, code, other languages, chat, odd spacing."""

PLAIN = (
    "The capital of France is",
    "1, 2, 3, 4,",
    "Once upon a time",
    "Q: What is 7 times 8?\nA:",
    "The three primary colours are",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "SELECT name, COUNT(*) FROM users WHERE",
    "for (int i = 0; i < n; i++) {\n",
    "Le chat est assis sur",
    "Der schnelle braune Fuchs",
    "El agua hierve a",
    "今日はとても",
    "Привет, как",
    "🙂🙂🙂 means",
    "   leading spaces and\ttabs\n\n",
    "A",
    "The transformer architecture, introduced in 2017, replaced recurrence by attention. " * 8,
    "In the beginning there was nothing, and then, slowly, there was a list of words: "
    + "alpha beta gamma " * 40,
)

CHAT = (
    "What is the capital of Italy?",
    "Write one sentence about the sea.",
    "Name two animals that can fly.",
    "Explain what a list is in Python.",
)
