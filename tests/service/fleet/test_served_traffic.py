"""What servers that follow report, on the wire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from understudy.evaluator.serving.shadow_health import ShadowCounts, ShadowReport
from understudy.service.fleet.served_traffic import decode_shadow, encode_counts, encode_shadow
from understudy.v1 import fleet_pb2

COUNTS = ShadowCounts(
    compared=9,
    disagreeing=2.5,
    not_finite=1,
    errors=2,
    dropped=3,
    largest_difference=float("inf"),
    seconds=0.25,
    serving_seconds=0.125,
)


def test_a_report_of_a_shadow_arrives_as_it_was() -> None:
    report = ShadowReport(step=20, digest="b" * 64, loaded=True, reason="", counts=COUNTS)
    assert decode_shadow(encode_shadow(report)) == report


@given(st.integers(-(2**63), 2**63 - 1), st.floats(), st.floats())
def test_whatever_several_servers_send_can_be_added_up_and_shown(count: int, share: float, seconds: float) -> None:
    message = fleet_pb2.ShadowReport(
        counts=fleet_pb2.ShadowCounts(compared=count, errors=count, disagreeing=share, seconds=seconds)
    )
    counts = decode_shadow(message).counts
    shown = encode_counts(counts.plus(counts))
    assert 0 <= shown.disagreeing <= shown.compared
