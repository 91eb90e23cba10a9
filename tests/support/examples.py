"""How many random programs a property is tried on."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings


def examples(count):
    """Run a property on a sixth of so many random programs; on all of them in the exhaustive tests."""

    def decorate(judged):
        @pytest.mark.parametrize("number", [max(count // 6, 2), pytest.param(count, marks=pytest.mark.exhaustive)])
        def test(number):
            source = st.randoms(use_true_random=False)
            settings(max_examples=number, deadline=None, derandomize=True)(given(source)(judged))()

        return test

    return decorate
