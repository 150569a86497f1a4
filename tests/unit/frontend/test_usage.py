"""What a request cost over several schedulers adds up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.frontend.usage import Usage, UsageSoFar

# One stream: whether an output came, tokens cached, preemptions, tokens computed again, and the seconds of: waiting for
# the admission, standing still after preemptions, and until the next scheduler.
STREAMS = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 9),
        st.integers(0, 3),
        st.integers(0, 99),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=6,
)


@given(STREAMS)
def test_d57_counts_add_up_and_times_never_exceed_what_has_passed(streams: list[tuple[bool, ...]]) -> None:
    so_far, now, has_outputs = UsageSoFar(), 0.0, False
    preemptions = again = 0
    first_cached: int | None = None
    admitted_after = 0.0
    for index, (yields, cached, num_preemptions, recomputed, waits, stands, gap) in enumerate(streams):
        if index:
            so_far.resumed(now)
        # As the scheduler counts: a request with outputs waits preempted, one without waits for its first admission.
        usage = Usage(num_cached_tokens=0 if has_outputs else cached)
        now += waits
        usage = replace(
            usage,
            queued_ns=0 if has_outputs else round(now * 1e9),
            preempted_ns=round(waits * 1e9) if has_outputs else 0,
        )
        if not has_outputs:
            first_cached, admitted_after = cached, now
        so_far.changed(usage, now)
        for number in range(1, num_preemptions + 1):
            usage = replace(usage, num_preemptions=number)
            so_far.changed(usage, now)
            now += stands
            usage = replace(usage, preempted_ns=usage.preempted_ns + round(stands * 1e9))
            so_far.changed(usage, now)
        usage = replace(usage, num_recomputed_tokens=recomputed)
        so_far.changed(usage, now)
        preemptions, again = preemptions + num_preemptions, again + recomputed
        has_outputs = has_outputs or bool(yields)
        if index == len(streams) - 1:
            break
        so_far.stream_lost(now, has_outputs=has_outputs)
        now += gap
    total = so_far.total(usage)
    assert (total.num_preemptions, total.num_recomputed_tokens) == (preemptions, again)
    assert total.num_cached_tokens == first_cached
    assert total.queued_ns == round(admitted_after * 1e9)
    assert 0 <= total.preempted_ns <= round((now - admitted_after) * 1e9) + 1
    assert total == replace(so_far.known(total.num_prompt_tokens, total.num_completion_tokens, now))


def test_d57_the_time_without_a_scheduler_counts_as_preempted_once_it_had_run() -> None:
    so_far = UsageSoFar()
    so_far.changed(Usage(queued_ns=5), 1.0)
    so_far.stream_lost(2.0, has_outputs=True)
    assert so_far.known(3, 4, 2.5) == Usage(3, 4, queued_ns=5, preempted_ns=500_000_000)
    so_far.resumed(4.0)
    assert so_far.total(Usage(3, 9, queued_ns=77, preempted_ns=1)) == Usage(
        3, 9, queued_ns=5, preempted_ns=2_000_000_001
    )


def test_d57_one_that_was_preempted_when_its_scheduler_was_lost_stands_still_since_then() -> None:
    so_far = UsageSoFar()
    so_far.changed(Usage(), 0.0)
    so_far.changed(Usage(num_preemptions=1), 1.0)
    so_far.stream_lost(2.0, has_outputs=True)
    so_far.resumed(3.0)
    assert so_far.total(Usage()).preempted_ns == 2_000_000_000
