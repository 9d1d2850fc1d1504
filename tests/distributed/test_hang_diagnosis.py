import pytest

from clusterddp.distributed.hang_diagnosis import judge
from clusterddp.distributed.heartbeat import Posting
from clusterddp.distributed.phase import Phase
from tests.distributed.test_heartbeat import posting

DATA, BACKWARD = Phase.DATA, Phase.BACKWARD


@pytest.mark.parametrize(
    ("postings", "silent", "kind", "ranks", "words"),
    [
        pytest.param(
            [posting(57, BACKWARD), posting(57, BACKWARD), posting(56, BACKWARD, host="h02")],
            {2: 31.4},
            "silent",
            (2,),
            [
                "rank 2 on h02 does not answer",
                "the last sign of rank 2 came 31 s ago, exchanging the gradients of step 56",
            ],
            id="stopped",
        ),
        pytest.param(
            [posting(57, BACKWARD), posting(58, BACKWARD)],
            {1: 31},
            "silent",
            (1,),
            ["rank 1 on h01 does not answer"],
            id="stopped where it is ahead",
        ),
        pytest.param(
            [posting(58, BACKWARD), posting(58, DATA, host="h02"), posting(58, BACKWARD)],
            {},
            "behind",
            (1,),
            [
                "rank 1 on h02 is behind: fetching the batch of step 58, while others are "
                "exchanging the gradients of step 58",
                "its log has its stack",
            ],
            id="behind",
        ),
        pytest.param(
            [posting(58, Phase.SAVE), posting(59, BACKWARD), posting(59, BACKWARD)],
            {},
            "behind",
            (0,),
            ["rank 0 on h01 is behind: saving after step 58"],
            id="rank 0's save comes before the next step",
        ),
        pytest.param(
            [posting(58, Phase.COUNT), posting(58, Phase.EVALUATE, still=3.0)],
            {},
            "behind",
            (1,),
            ["rank 1 on h01 is behind: evaluating after step 58", "last moved 3 s ago"],
            id="slow",
        ),
        pytest.param(
            [posting(1, DATA), posting(0, Phase.START), posting(0, Phase.START, host="h02")],
            {},
            "behind",
            (1, 2),
            ["rank 1 on h01 and rank 2 on h02 are behind: starting,", "their logs have"],
            id="two behind",
        ),
        pytest.param(
            [posting(58, BACKWARD)] * 3,
            {},
            "level",
            (),
            ["all 3 ranks are at the same place, exchanging the gradients of step 58"],
            id="level",
        ),
        pytest.param(
            [posting(58, BACKWARD), posting(57, Phase.UPDATE, left=True), posting(58, BACKWARD)],
            {},
            "left",
            (1,),
            ["rank 1 on h01 left the training, updating the weights in step 57", "log of rank 1"],
            id="left",
        ),
        pytest.param(
            [posting(58, BACKWARD), posting(58, BACKWARD), posting(58, BACKWARD, left=True)],
            {1: 31},
            "silent",
            (1,),
            ["rank 1 on h01 does not answer"],
            id="left for the want of the silent one",
        ),
        pytest.param(
            [posting(60, Phase.DONE, left=True), posting(60, Phase.SAVE)],
            {},
            "behind",
            (1,),
            ["rank 1 on h01 is behind: saving after step 60, while others are done"],
            id="done is no desertion",
        ),
    ],
)
def test_the_rank_to_blame_is_named(
    postings: list[Posting],
    silent: dict[int, float],
    kind: str,
    ranks: tuple[int, ...],
    words: list[str],
) -> None:
    verdict = judge(dict(enumerate(postings)), silent, len(postings), silent_seconds=30)
    assert (verdict.kind, verdict.ranks) == (kind, ranks)
    for some in words:
        assert some in verdict.text
    assert bool(verdict.reason) == (kind in ("silent", "behind"))
    assert "rank" not in verdict.reason


def test_a_rank_that_never_posted_is_named() -> None:
    verdict = judge({0: posting(1, BACKWARD)}, {1: 31}, 2, 30)
    assert verdict.ranks == (1,)
    assert "rank 1 does not answer" in verdict.text and "never gave a sign" in verdict.text


def test_many_silent_ranks_fit_in_a_line() -> None:
    seen = {rank: posting(9, BACKWARD, host=f"h{rank // 8:03}") for rank in range(1000)}
    verdict = judge(seen, dict.fromkeys(range(8, 1000), 31.0), 1000, 30)
    assert "ranks 8, 9, 10, 11, 12, 13, 14, 15 on h001 and ranks 16" in verdict.text
    assert "and 976 more do not answer" in verdict.text
    assert len(verdict.text) < 500
