"""The store of responses: what it finds, whose, and what goes when it is full."""

from __future__ import annotations

from typing import Any

from sparkdraft.server.response_store import ResponseStore, memory_of


def response(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "output": [{"id": f"msg_{name}", "type": "message", "text": text}]}


def asked(name: str, text: str = "") -> list[dict[str, Any]]:
    return [{"id": f"in_{name}", "type": "message", "text": text}]


def test_a_response_is_found_with_all_that_came_before_it() -> None:
    store = ResponseStore()
    assert store.keep("me", response("a"), asked("a"))
    assert store.keep("me", response("b"), asked("b"), store.find("me", "a"))
    stored = store.find("me", "b")
    assert stored and [item["id"] for item in stored.input] == ["in_a", "msg_a", "in_b"]
    assert [item["id"] for item in stored.items] == ["in_a", "msg_a", "in_b", "msg_b"]
    assert [item["id"] for item in stored.own_items] == ["in_b", "msg_b"]


def test_another_owner_finds_nothing() -> None:
    store = ResponseStore()
    store.keep("me", response("a"), asked("a"))
    assert store.find("you", "a") is store.item("you", "msg_a") is None
    assert not store.delete("you", "a") and store.find("me", "a")


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    store.keep("me", response("a"), asked("a"))
    store.keep("me", response("b"), asked("b"))
    assert store.find("me", "a")  # used, so b is now the oldest
    store.keep("me", response("c"), asked("c"))
    assert len(store) == 2 and store.find("me", "b") is None and store.find("me", "a") and store.find("me", "c")
    assert store.item("me", "msg_b") is store.item("me", "in_b") is None


def test_a_response_outlives_those_that_it_continues() -> None:
    store = ResponseStore(max_responses=1)
    store.keep("me", response("a"), asked("a"))
    store.keep("me", response("b"), asked("b"), store.find("me", "a"))
    assert store.find("me", "a") is None and store.item("me", "msg_a") is None
    stored = store.find("me", "b")
    assert stored and [item["id"] for item in stored.input] == ["in_a", "msg_a", "in_b"]


def test_bytes_are_bounded() -> None:
    store = ResponseStore(max_bytes=4000)
    for i in range(20):
        assert store.keep("me", response(f"r{i}", "x" * 100), asked(f"r{i}", "y" * 50))
        assert store.num_bytes <= 4000
    assert 1 < len(store) < 6 and store.find("me", "r19") and not store.find("me", "r0")
    for i in range(20):
        store.delete("me", f"r{i}")
    assert store.num_bytes == len(store) == 0 and not store._items


def test_a_chain_is_counted_whole() -> None:
    store = ResponseStore()
    store.keep("me", response("a", "x" * 1000), asked("a"))
    alone = store.num_bytes
    store.keep("me", response("b"), asked("b"), store.find("me", "a"))
    added = memory_of(response("b")) + memory_of(asked("b"))
    assert store.num_bytes == 2 * alone + added


def test_small_values_are_counted_as_what_they_take() -> None:
    """An empty list is three bytes of JSON and far more in memory."""
    assert memory_of([[]] * 1000) > 50_000 > memory_of(["x" * 3000])


def test_what_alone_exceeds_the_limit_is_not_kept_and_nothing_goes_for_it() -> None:
    store = ResponseStore(max_bytes=1000)
    store.keep("me", response("a"), asked("a"))
    assert not store.keep("me", response("b", "x" * 2000), asked("b"))
    assert store.find("me", "a") and not store.find("me", "b")


def test_the_same_id_twice_is_one_response() -> None:
    store = ResponseStore()
    store.keep("me", response("a", "old"), asked("a"))
    store.keep("me", response("a", "new"), asked("a"))
    stored = store.find("me", "a")
    assert len(store) == 1 and stored and stored.response["output"][0]["text"] == "new"
    store.delete("me", "a")
    assert store.num_bytes == 0
