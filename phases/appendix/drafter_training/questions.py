"""Beginnings of questions, so that not all of them are the ones the model likes best.

A model that asks itself from nothing asks much the same: about scripts, about stories it was shown. A drafter
that has read only answers to those guesses badly for people. So most questions are begun here, with a form of
words and mostly a topic, and the model ends them. Half of the topics are words of its own vocabulary: a list
that somebody writes is read to its end in minutes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence


def _parts(text: str) -> list[str]:
    return [part for line in text.split("\n") for part in line.split("|") if part]


OWN = 0.15
"""Of all questions, those that the model begins as well."""
FROM_VOCABULARY = 0.5
"""Of all topics, those that are words of the vocabulary."""
SHORTEST = 5
"""Letters of such a word: shorter tokens are mostly parts of words."""
FORMS = _parts("""
What is {}?|What are the main ideas behind {}?|Why is {} important?|How does {} work?|Explain {} to a child.
Explain {} in simple terms.|Give me three tips about {}.|What should I know about {}?
Write a short poem about {}.|Write a short story about {}.|Tell me a joke about {}.|Who first thought of {}?
What is the history of {}?|How do I get started with {}?|What are common mistakes with {}?
List five facts about {}.|Compare {} with {}.|What is the difference between {} and {}?
How are {} and {} connected?|Is {} better than {}?|Summarize what is known about {}.
Write an email to a friend about {}.|Write a polite letter about {}.|Plan a week around {}.
Give me a recipe with {}.|What would happen without {}?|What are the pros and cons of {}?
Describe {} in one paragraph.|Can you help me with {}?|I am worried about {}. What can I do?
Teach me about {} step by step.|What questions should I ask about {}?
Write a dialogue between two people about {}.|Give me an outline of an essay on {}.
Translate "{}" into French.|What do beginners get wrong about {}?|How can I save money on {}?
Suggest a title for a book about {}.|Where can I learn about {}?|How has {} changed over the last century?
Who was|When did|Where is|How many|What is the capital of|Why do people|How do I make|How do I fix
How can I learn|What is the best way to|Write a Python function that|Write a SQL query that
What does this word mean:|Correct the grammar of this sentence:|Rewrite this more politely:
Summarize this text:|Solve this step by step:|If a train|Name three|Give an example of|Should I|Can I
Is it true that|What are some good|Recommend|Describe the city of|Imagine that|Pretend to be|Make a list of
Explain why|What causes|What happens when|Could you|Please|My|I want to|I cannot|Which|Tell me|Who invented
How long|How often|How much|What should I do if|What should I|Write four sentences about {}.|Where do
Do I need|Help me|Explain to a friend|In one sentence, what is {}?|How does somebody use {}?
What makes {} special?
""")
TOPICS = _parts("""
the moon|gravity|rain|volcanoes|the sea|photosynthesis|black holes|electricity|magnets|atoms|vaccines
the heart|sleep|memory|dreams|exercise|running|yoga|swimming|football|chess|music|jazz|the piano|painting
photography|films|theatre|poetry|novels|fairy tales|history|ancient Rome|Egypt|the Renaissance
the French Revolution|the printing press|democracy|elections|laws|money|banks|taxes|inflation|trade
a small business|marketing|job interviews|leadership|teamwork|school|homework|exams|languages|grammar
spelling|mathematics|fractions|algebra|geometry|probability|prime numbers|statistics|logic|programming
Python|lists|recursion|databases|the internet|passwords|robots|machine learning|computers|mobile phones
batteries|bicycles|cars|trains|aeroplanes|bridges|houses|gardens|roses|trees|forests|mushrooms|bees|ants
birds|whales|dogs|cats|horses|elephants|dinosaurs|evolution|the weather|climate change|recycling
solar energy|wind power|water|rivers|mountains|deserts|Paris|Japan|Brazil|Africa|Australia|camping
travelling alone|packing a suitcase|breakfast|bread|pasta|soup|chocolate|coffee|tea|cheese|apples|rice
healthy food|vegetarian cooking|birthdays|weddings|friendship|family|children|parents|neighbours|kindness
courage|happiness|stress|anger|loneliness|time management|habits|meditation|philosophy|ethics|religion
justice|art|architecture|fashion|toys|puzzles|magic|superheroes|space travel|Mars|satellites|telescopes
clocks|calendars|maps|newspapers|advertising
""")


def words_of(texts: Iterable[str]) -> list[str]:
    """The lower-case words among a vocabulary's tokens, by their texts: those that stand behind a space."""
    found = (text[1:] for text in texts if text.startswith(" ") and len(text) > SHORTEST)
    return sorted({word for word in found if word.isascii() and word.isalpha() and word.islower()})


def beginning(rng: random.Random, words: Sequence[str] = ()) -> str:
    """Return how a question begins; often that is all of it. Empty: the model begins as well.

    words: further topics.
    """
    if rng.random() < OWN:
        return ""
    form = rng.choice(FORMS)
    topics = [
        rng.choice(words if words and rng.random() < FROM_VOCABULARY else TOPICS)
        for _ in range(form.count("{}"))
    ]
    return form.format(*topics)


PEOPLE = (
    "Why is the sky blue?",
    "Give me three tips for a job interview.",
    "Explain photosynthesis to a child.",
    "Could you write four lines about the harbour at dawn?",
    "What is the capital of Australia, and why is it not Sydney?",
    "How do I make an omelette?",
    "Who was Marie Curie?",
    "Write a Python function that reverses a string.",
    "My cat does not eat. What should I do?",
    "What is the difference between weather and climate?",
    "I cannot fall asleep at night. Any advice?",
    "How does a kite stay up in the air?",
    "Please thank my colleague for her help in two sentences.",
    "What should I pack for a week in Norway in winter?",
    "Why did the Roman Empire fall?",
    "How long do I have to boil an egg?",
)
"""Questions as people ask them; none is trained on. They say what a drafter is worth to a stranger."""
