from __future__ import annotations

from base64 import urlsafe_b64encode

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.evaluator_errors import InvalidInputError
from understudy.service.handlers import paging
from understudy.v1 import evaluation_pb2


def place(sequence: int, seconds: int = 0, nanos: int = 0) -> paging.Place:
    return paging.Place(sequence=sequence, recorded_at=Timestamp(seconds=seconds, nanos=nanos))


places = st.builds(place, st.integers(0, 2**63 - 1), st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**9 - 1))


@given(place=places, filters=st.binary())
def test_a_token_leads_back_to_its_place(place: paging.Place, filters: bytes) -> None:
    assert paging.decode_token(paging.encode_token(place, filters), filters) == place


@given(
    token=st.text(min_size=1) | st.binary(min_size=24, max_size=24).map(lambda token: urlsafe_b64encode(token).decode())
)
def test_any_text_is_a_token_of_ours_or_the_callers_error(token: str) -> None:
    try:
        found = paging.decode_token(token, b"")
    except InvalidInputError:
        return
    assert found is not None
    assert paging.encode_token(found, b"") == token


@pytest.mark.parametrize("sequence", [2**63, 2**64 - 1])
def test_a_sequence_that_no_ledger_holds_is_refused(sequence: int) -> None:
    with pytest.raises(InvalidInputError, match="not from this server"):
        paging.decode_token(paging.encode_token(place(sequence), b""), b"")


def test_a_token_of_other_filters_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="other filters"):
        paging.decode_token(paging.encode_token(place(7), b"dataset=test"), b"dataset=train")


def test_no_token_is_the_beginning() -> None:
    assert paging.decode_token("", b"anything") is None


@pytest.mark.parametrize(("asked", "given_size"), [(None, 100), (1, 1), (1000, 1000), (5000, 1000)])
def test_page_sizes_have_a_default_and_a_limit(asked: int | None, given_size: int) -> None:
    assert paging.page_size(asked) == given_size


@pytest.mark.parametrize("asked", [0, -1])
def test_a_page_without_room_is_refused(asked: int) -> None:
    with pytest.raises(InvalidInputError, match=f"page_size is {asked}; give 1 to 1000, or leave it out for 100"):
        paging.page_size(asked)


def test_a_page_of_large_records_ends_early_but_has_one() -> None:
    records = [evaluation_pb2.EvaluationRecord(sequence=number, reason="x" * 3 * 2**20) for number in range(1, 4)]
    assert [record.sequence for record in paging.fitting(records)] == [1]
    huge = evaluation_pb2.EvaluationRecord(sequence=9, reason="x" * 5 * 2**20)
    assert [record.sequence for record in paging.fitting([huge, *records])] == [9]
    small = [evaluation_pb2.EvaluationRecord(sequence=number) for number in range(1, 1001)]
    assert paging.fitting(iter(small)) == small
    assert paging.fitting([]) == []
