"""A conversation over connections that lose, double and reorder."""

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.reliable_link import Inbox, Lost, Outbox


def test_what_was_not_heard_is_said_again_and_taken_once():
    outbox, inbox = Outbox(), Inbox()
    for word in "abc":
        outbox.add(word)
    assert [inbox.take(number, before) for number, before, _ in outbox.after(0)] == [True] * 3
    outbox.heard(2)
    assert [word for *_, word in outbox.after(inbox.last)] == []
    assert [word for *_, word in outbox.after(2)] == ["c"]
    assert [word for *_, word in outbox.after(0)] == ["c"]  # no more is kept
    assert not inbox.take(3, 2)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["say", "twice", "lose", "late", "reconnect", "hear"])))
def test_whatever_a_connection_does_every_word_is_taken_once_and_in_order(happenings):
    outbox, inbox = Outbox(), Inbox()
    said, taken, late = [], [], []

    def arrive(number, before, word):
        try:
            if inbox.take(number, before):
                taken.append(word)
        except Lost:
            reconnect()

    def reconnect():
        for each in list(outbox.after(inbox.last)):
            arrive(*each)

    for happening in happenings:
        if happening == "reconnect":
            reconnect()
        elif happening == "hear":
            outbox.heard(inbox.last)
        else:
            word = len(said)
            said.append(word)
            number, before = outbox.add(word)
            if happening == "late":
                late.append((number, before, word))
            if happening in ("say", "twice"):
                arrive(number, before, word)
            if happening == "twice":
                arrive(number, before, word)
            if happening == "say":
                while late:
                    arrive(*late.pop())
        assert taken == said[: len(taken)]
    reconnect()
    assert taken == said


def test_of_too_many_words_the_oldest_unimportant_ones_are_forgotten():
    outbox = Outbox(limit=4, can_drop=str.islower)
    inbox = Inbox()
    for word in "aBcdefg":
        outbox.add(word)
    taken = [word for number, before, word in outbox.after(0) if inbox.take(number, before)]
    assert taken[0] == "B"
    assert taken[-1] == "g"
    assert len(outbox) <= 4
    number, before = outbox.add("h")
    assert inbox.take(number, before)
