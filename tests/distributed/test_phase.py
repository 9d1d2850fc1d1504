from clusterddp.distributed.phase import Phase, Progress

DATA, BACKWARD = Phase.DATA, Phase.BACKWARD


def test_a_place_only_grows_in_whatever_order_a_step_goes() -> None:
    progress, places = Progress(), []
    for step, phase in (
        [(0, Phase.START)]
        + [(1, phase) for phase in (DATA, Phase.FORWARD, BACKWARD) * 2]  # gradients accumulated
        + [(1, Phase.UPDATE), (1, Phase.SAVE), (1, Phase.EVALUATE), (2, DATA)]
    ):
        progress.mark(step, phase)
        places.append(progress.place)
    assert places == sorted(set(places))
    assert len(places) == 11


def test_a_mark_that_changes_nothing_is_a_sign_of_life() -> None:
    progress = Progress()
    progress.mark(1, Phase.EVALUATE)
    before, place = progress.state, progress.place
    progress.mark(1, Phase.EVALUATE)
    assert progress.place == place and progress.state != before
