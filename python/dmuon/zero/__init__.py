"""DeepSpeed ZeRO-0, 1, 2 and 3. No ZeRO stage can be told to skip a parameter, so dedicated matrices are hidden
among the buffers before DeepSpeed looks, and joined to its engine afterwards::

    # ds_config.json: "optimizer": {"type": "DMuon", "params": {"lr": 0.02}}, "dmuon": {"include": ["*_proj"]}
    engine, optimizer, loader, scheduler = dmuon.zero.initialize(model=model, config="ds_config.json")

After ``import dmuon`` plain ``deepspeed.initialize`` does the same with such a config. Step by step::

    plan = dmuon.dedicate_params_zero(model, config, predicate)
    optimizer = dmuon.zero.OwnerOptimizer(model.parameters(), plan=plan, lr=0.02)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    dmuon.zero.attach(engine, plan)

Importing this needs no DeepSpeed; using it does.
"""

from dmuon.zero.attach import attach
from dmuon.zero.checkpoint import load_dedicated
from dmuon.zero.helpers import full_fp32_param, named_parameters
from dmuon.zero.initialize import initialize
from dmuon.zero.optimizer import OwnerOptimizer
from dmuon.zero.plan import Plan, dedicate_params_zero

__all__ = [
    "OwnerOptimizer",
    "Plan",
    "attach",
    "dedicate_params_zero",
    "full_fp32_param",
    "initialize",
    "load_dedicated",
    "named_parameters",
]
