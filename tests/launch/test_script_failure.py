"""Which rank ended a script's attempt, and the end of what it printed."""

from paceline.launch.script_failure import first_failure

TRACEBACK = """step 3
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
  File "train.py", line 5, in main
    raise ValueError("bad sample")
ValueError: bad sample
some library says goodbye
"""
PEER = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 5, in main
[rank1]:     dist.all_reduce(x)
[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711
"""
SYNTAX = """  File "/home/me/train.py", line 3
    x = = 3
        ^
SyntaxError: invalid syntax
"""


def test_what_a_terminal_would_obey_is_taken_out_and_long_words_are_cut():
    evil = "\x1b]0;title\x07\x1b[31m\u202e"
    raised = first_failure({0: TRACEBACK.replace("bad sample", evil + "x" * 5000)}, 0)
    assert raised is not None
    assert raised.words == f"ValueError: {'x' * 488}"
    assert not any(sign in "".join(raised.lines) for sign in "\x1b\x07\u202e")


def test_a_traceback_is_shown_to_its_exception():
    raised = first_failure({0: TRACEBACK}, 0)
    assert raised is not None
    assert raised.lines[0].startswith("Traceback")
    assert raised.lines[-1] == raised.words == "ValueError: bad sample"
    assert not raised.is_passing


def test_a_syntax_error_has_no_header_and_is_shown():
    raised = first_failure({0: SYNTAX}, 0)
    assert raised is not None
    assert raised.words == "SyntaxError: invalid syntax (/home/me/train.py:3)"
    assert 'File "/home/me/train.py", line 3' in raised.lines[0]


def test_the_rank_that_the_first_one_lost_is_the_cause():
    raised = first_failure({0: TRACEBACK, 1: PEER}, 1)
    assert raised is not None
    assert (raised.rank, raised.words) == (0, "ValueError: bad sample")


def test_a_lost_peer_without_a_cause_may_pass():
    raised = first_failure({0: "step 3\n", 1: PEER}, 1)
    assert raised is not None
    assert (raised.rank, raised.is_passing) == (1, True)
    assert raised.words is not None
    assert raised.words.startswith("RuntimeError")


def test_a_port_that_is_taken_may_pass():
    text = TRACEBACK.replace("ValueError: bad sample", "OSError: [Errno 98] Address already in use")
    raised = first_failure({0: text}, 0)
    assert raised is not None
    assert raised.is_passing


def test_what_a_process_says_last_is_shown_and_named_only_where_it_is_an_error():
    raised = first_failure(
        {0: "usage: train.py\ntrain.py: error: unrecognized arguments: --x\n"}, 0
    )
    assert raised is not None
    assert raised.words == "train.py: error: unrecognized arguments: --x"
    quiet = first_failure({0: "step 4\nstep 5\n"}, 0)
    assert quiet is not None
    assert (quiet.words, quiet.lines) == (None, ("step 4", "step 5"))
    assert first_failure({0: ""}, 0) is None


def test_behind_a_progress_bar_the_traceback_is_found():
    raised = first_failure({0: "\r 3%|▎   | 1/30 [00:01<00:12, 2.1it/s]" + TRACEBACK[7:]}, 0)
    assert raised is not None
    assert raised.lines[0].startswith("Traceback")


def test_the_exception_that_others_were_raised_from_is_shown():
    second = "\nThe above exception was the direct cause of the following exception:\n\n"
    second += TRACEBACK[7:].replace("ValueError: bad sample", "RuntimeError: step failed")
    raised = first_failure({0: TRACEBACK.replace("some library says goodbye\n", second)}, 0)
    assert raised is not None
    assert raised.words == "ValueError: bad sample"


def test_an_exception_that_was_caught_before_is_not_shown():
    later = TRACEBACK.replace("ValueError: bad sample", "KeyError: 'x'")
    raised = first_failure({0: TRACEBACK + later}, 0)
    assert raised is not None
    assert raised.words == "KeyError: 'x'"


def test_only_the_end_of_a_deep_traceback_is_shown():
    frames = '  File "a.py", line 1, in f\n    f()\n' * 500
    raised = first_failure(
        {0: f"Traceback (most recent call last):\n{frames}RecursionError: x\n"}, 0
    )
    assert raised is not None
    assert len(raised.lines) < 20
    assert raised.lines[-1] == "RecursionError: x"
