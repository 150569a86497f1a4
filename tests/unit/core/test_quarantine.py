"""Requests that may be what ends epochs (D31): suspect after two without a token, alone from then on, failed after the
third."""

from __future__ import annotations

from scheduler_svc.core import reasons
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.events import EndReason
from scheduler_svc.core.reasons import SkipReason
from tests.support.core_harness import World

CONFIG = SchedulerConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def crash(world: World, rank: str = "r0", *, graceful: bool = False) -> None:
    """The worker dies with a step in flight, and another one joins."""
    world.schedule(rank)
    world.lose(rank, graceful=graceful)
    world.join(rank, 20)


def reason(world: World, request_id: str) -> SkipReason | None:
    explanation = world.scheduler.explain(request_id)
    assert explanation is not None
    return explanation.reason


def test_two_fruitless_epochs_make_a_suspect_and_a_third_one_fails_it() -> None:
    world = World(CONFIG)
    poison = world.submit("poison", 5, 4)
    crash(world)
    assert not world.quarantine.holds(world.request("poison"))
    crash(world)
    assert world.quarantine.holds(world.request("poison"))
    crash(world)
    assert poison.ended is not None and poison.reason is EndReason.WORKER_FAULT
    assert "3 workers" in poison.ended.message and world.scheduler.totals.num_failed == 1
    world.run()


def test_a_token_clears_a_suspect() -> None:
    world = World(CONFIG)
    client = world.submit("a", 5, 4)
    crash(world)
    crash(world)
    world.step()
    assert not world.quarantine.holds(world.request("a"))
    for _ in range(2):
        crash(world)
    assert client.ended is None, "the count starts anew"
    world.run()
    world.check_texts()


def test_a_token_between_two_epochs_makes_them_not_in_a_row() -> None:
    world = World(CONFIG)
    world.submit("a", 5, 9)
    for _ in range(5):
        world.step()
        crash(world)
        assert world.quarantine.num_fruitless_epochs(world.request("a")) == 1
    world.run()
    world.check_texts()


def test_only_requests_with_rows_in_flight_are_blamed() -> None:
    world = World(CONFIG)
    world.submit("in flight", 5, 4)
    world.schedule()
    world.submit("queued", 5, 4)
    world.lose("r0")
    assert world.quarantine.num_fruitless_epochs(world.request("in flight")) == 1
    assert world.quarantine.num_fruitless_epochs(world.request("queued")) == 0
    world.join("r0", 20)
    world.step()
    while world.answers["r0"]:
        world.ack()
    world.lose("r0")
    assert world.quarantine.num_fruitless_epochs(world.request("queued")) == 0, "its row was answered"


def test_graceful_ends_are_not_counted() -> None:
    world = World(CONFIG)
    client = world.submit("a", 5, 4)
    for _ in range(5):
        crash(world, graceful=True)
    assert world.quarantine.num_fruitless_epochs(world.request("a")) == 0
    world.run()
    assert len(client.tokens) == 4


def test_with_the_limit_off_nobody_fails() -> None:
    world = World(SchedulerConfig(block_size=4, max_fruitless_epochs=0))
    client = world.submit("a", 5, 4)
    for _ in range(6):
        crash(world)
    world.run()
    assert len(client.tokens) == 4


def make_suspects(world: World, *names: str) -> None:
    for name in names:
        world.submit(name, 5, 6)
    crash(world)
    crash(world)
    assert all(world.quarantine.holds(world.request(name)) for name in names)


def test_a_suspect_runs_alone_and_the_others_after_it() -> None:
    world = World(CONFIG)
    make_suspects(world, "poison")
    world.submit("innocent", 5, 6)
    world.schedule()
    assert world.running() == ["poison"]
    assert reason(world, "innocent") is reasons.RANK_QUARANTINED
    world.ack()
    world.schedule()
    assert world.running() == ["poison", "innocent"], "it has a token: nothing sets it apart any more"
    world.run()
    world.check_texts()


def test_suspects_take_turns_so_that_the_innocent_one_survives() -> None:
    """Both were in flight when the epochs ended; alone, one gets its token and the other one fails."""
    world = World(CONFIG)
    make_suspects(world, "poison", "innocent")
    crash(world)
    assert world.clients[0].reason is EndReason.WORKER_FAULT and world.clients[1].ended is None
    world.schedule()
    assert world.running() == ["innocent"]
    world.run()
    assert len(world.clients[1].tokens) == 6
    world.check_texts()


def suspect_beside_a_busy_rank(max_tokens: int = 6) -> World:
    """`poison` waits, a suspect by two losses of r0, which is gone; r1 runs `busy`."""
    world = World(CONFIG, ranks={"r0": 20, "r1": 20})
    world.submit("busy", 5, max_tokens)
    world.schedule("r1")
    world.submit("poison", 5, 6)
    crash(world, "r0")
    crash(world, "r0")
    world.lose("r0")
    return world


def test_a_suspect_waits_until_its_rank_is_empty_while_nobody_else_comes_in() -> None:
    world = suspect_beside_a_busy_rank()
    assert world.quarantine.holds(world.request("poison")) and world.running("r1") == ["busy"]
    world.submit("later", 5, 6)
    world.schedule("r1")
    assert world.running("r1") == ["busy"] and world.reserved_for("r1") == "poison"
    assert reason(world, "poison") is reasons.RANK_QUARANTINED
    order = []
    while world.scheduler.num_live_requests:
        world.turn()
        order.append(list(world.running("r1")))
    assert ["poison"] in order and order.index(["poison"]) < next(i for i, ids in enumerate(order) if "later" in ids)
    world.run()
    world.check_texts()


def test_a_rank_reserved_for_a_suspect_is_given_up_when_the_suspect_ends() -> None:
    world = suspect_beside_a_busy_rank()
    world.schedule("r1")
    assert world.reserved_for("r1") is not None
    world.abort("poison")
    assert world.reserved_for("r1") is None
    world.submit("later", 5, 6)
    world.turn()
    world.turn()
    assert world.running("r1") == ["busy", "later"]
    world.run()


def test_another_rank_goes_on_while_one_is_reserved() -> None:
    world = World(CONFIG, ranks={"r0": 20, "r1": 20, "r2": 20})
    for rank, name in (("r1", "busy one"), ("r2", "busy two")):
        world.submit(name, 5, 9)
        world.schedule(rank)
    world.submit("poison", 5, 6)
    crash(world, "r0")
    crash(world, "r0")
    world.lose("r0")
    world.schedule("r1")
    assert world.reserved_for("r1") == "poison"
    world.submit("later", 5, 6)
    world.schedule("r2")
    assert world.running("r2") == ["busy two", "later"], "the suspect is put aside there"
    assert reason(world, "poison") is reasons.QUARANTINED
    world.run()
    world.check_texts()


def test_an_empty_rank_takes_a_suspect_that_another_one_kept_itself_free_for() -> None:
    world = suspect_beside_a_busy_rank(30)
    world.schedule("r1")
    assert world.reserved_for("r1") == "poison"
    world.join("r0", 20)
    later = world.submit("later", 5, 4)
    assert world.rows_of(world.schedule("r0")) == [("poison", 5)]
    assert world.reserved_for("r1") is None
    world.turn()
    world.turn()
    assert world.running("r1") == ["busy", "later"], "and r1 admits again"
    world.run()
    assert len(later.tokens) == 4
    world.check_texts()


def test_a_reserved_suspect_is_not_left_to_a_rank_with_a_longer_prefix() -> None:
    """It waited for this rank to become empty; now it is its turn here."""
    world = World(CONFIG, ranks={"r0": 20, "r1": 20, "r2": 20})
    prompt = list(range(12))
    world.submit("warm", prompt, 1)
    for _ in range(3):
        world.step("r2")
    world.submit("busy", 5, 2)
    world.schedule("r1")
    world.submit("poison", [*prompt, 50], 6)
    for _ in range(2):
        world.request("poison").ticket.num_passes = 9
        crash(world, "r0")
    world.request("poison").ticket.num_passes = 0
    world.lose("r0")
    world.schedule("r1")
    assert world.reserved_for("r1") == "poison"
    world.run()
    world.check_texts()


def test_rows_dropped_by_a_reset_do_not_count_as_fruitless() -> None:
    world = World(CONFIG)
    world.submit("a", 5, 6)
    world.schedule()
    world.reset(preempt_running=True)
    world.lose("r0")
    assert world.quarantine.num_fruitless_epochs(world.request("a")) == 0
    world.join("r0", 20)
    world.run()
    world.check_texts()


def test_a_preempted_request_with_rows_in_flight_is_blamed_and_awaits_nothing_afterwards() -> None:
    world = World(SchedulerConfig(block_size=4, enable_prefix_caching=False), num_blocks=5)
    world.submit("a", 8, 6)
    world.submit("b", 8, 6)
    world.schedule()
    world.schedule()
    assert world.waiting == ["b"] and world.request("b").awaited == 1
    world.lose("r0")
    assert [world.quarantine.num_fruitless_epochs(world.request(name)) for name in "ab"] == [1, 1]
    assert [world.request(name).awaited for name in "ab"] == [0, 0]
    assert world.waiting == ["a", "b"]
    world.join("r0", 5)
    world.run()
    world.check_texts()
