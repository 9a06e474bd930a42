"""What a rank reports of the exception that ends it."""

from paceline.errors import JobError
from paceline.runtime.worker import _last_words


def test_an_error_of_ours_is_named_by_its_code_and_others_by_their_class():
    ours = JobError.of(code="M015", what="x is not finite", where="model", fix="take another")
    said = _last_words(ours)
    assert (said.kind, said.retry, said.exit_code) == ("M015", False, 2)
    assert said.message == "x is not finite\n  where: model\n  fix: take another"
    other = _last_words(KeyError("labels"))
    assert (other.kind, other.message, other.retry) == ("KeyError", "'labels'", True)
