"""HSDP and tensor parallelism together, on eight ranks (what they share is in test_parity)."""

import dmuon
from torch.distributed.fsdp import fully_shard

from tests.support.meshes import cube, run_on
from tests.support.parity import check_parity, gathered, setup
from tests.support.tp_models import MIXED

LAYOUT = cube(2, 2, 2)


def test_every_matrix_has_one_cell_and_one_tp_owner_in_it():
    run_on(LAYOUT, check_cells)


def check_cells(rank, layout):
    run = setup(layout, **MIXED)
    params = dmuon.get_dedicated_params(run.model)
    owned = {p.fqn for p in dmuon.get_owned_params(run.model, rank)}
    everyone = gathered(owned)
    for p in params:
        holders = [r for r, names in enumerate(everyone) if p.fqn in names]
        cells = {layout.data_rank(r) for r in holders}
        assert len(cells) == 1, f"{p.fqn} is owned by {holders}"
    used = {r for r, names in enumerate(everyone) if names}
    assert used == set(range(layout.ranks)), "17 matrices, 4 cells of 2 ranks"


def test_one_unit_for_the_whole_model():
    run_on(LAYOUT, check_one_unit)


def check_one_unit(rank, layout):
    """As the spec writes it: fully_shard of the model alone, boundary at the model."""
    check_parity(
        rank,
        layout,
        wrap=lambda model, mesh: fully_shard(model, mesh=mesh),
        dedicate={"hook_boundary_resolver": lambda name, param: ""},
        **MIXED,
    )
