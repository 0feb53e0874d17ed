"""The listing of Trainer as a script of its own: it trains, and saves as Trainer does by default."""

import glob
import re

import torch

from tests.support.hf import need
from tests.support.ranks import ROOT, run_fresh

need("transformers", "accelerate")
SCRIPT = ROOT / "examples" / "spec" / "hf_trainer_dmuon.py"
AROUND = """
import os
os.chdir({folder!r})
os.environ |= {{"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}}
{script}
if os.environ["RANK"] == "0":
    torch.save(weights, "weights.pt")
"""


def test_the_listing_runs_to_its_end(tmp_path):
    script = AROUND.format(folder=str(tmp_path), script=SCRIPT.read_text())
    first, _ = run_fresh(script, 2)
    (folder,) = glob.glob(f"{tmp_path}/output/checkpoint-48")
    assert float(re.search(r"'train_loss': '?([0-9.]+)", first)[1]) < 3.7  # ln 48 = 3.87
    check_pretrained(folder, torch.load(tmp_path / "weights.pt"))


def check_pretrained(folder, weights):
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert set(read) == set(weights)
    assert all(torch.equal(read[name], w) for name, w in weights.items())
