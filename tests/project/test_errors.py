"""The tree of errors: one root, picklable, each with the next thing to do."""

from __future__ import annotations

import inspect
import pickle

import pytest

from raysvc import errors

VALUES: dict[str, object] = {"str": "text", "float": 1.5, "int": 3, "int | None": None}
VALUES["Sequence[tuple[str, str, str, float]]"] = (("text", "text", "text", 1.5),)


def every_error() -> list[type[errors.RaysvcError]]:
    found = [
        cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__
    ]
    return [cls for cls in found if cls is not errors.RaysvcError]


def make(cls: type[errors.RaysvcError]) -> errors.RaysvcError:
    parameters = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return cls(*(VALUES[str(parameter.annotation)] for parameter in parameters))


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_an_error_survives_a_round_trip_with_its_text_and_fields(cls: type[errors.RaysvcError]) -> None:
    if cls is errors.LeaseError:
        return
    error = make(cls)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)
    assert "; " in str(error), "the text ends with what to do"


@pytest.mark.parametrize("cls", every_error(), ids=lambda cls: cls.__name__)
def test_every_error_stands_in_the_drawn_tree(cls: type[errors.RaysvcError]) -> None:
    assert issubclass(cls, errors.RaysvcError)
    assert cls.__name__ in str(errors.__doc__)
