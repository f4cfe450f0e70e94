import csv
import json

import pytest
import timm
import torch

from alltokens.bench import train
from alltokens.bench.results import TrainRow, columns
from alltokens.bench.train import bench_train, matmul_rate
from alltokens.cli import main
from alltokens.models import cost

CPU = torch.device("cpu")
VIT = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "img_size": 32, "num_classes": 7}


@pytest.fixture
def tiny_model(monkeypatch):
    """A model that takes milliseconds instead of deit_tiny_patch16_224."""

    def create(name, **options):
        net = real("vit_tiny_patch16_224", **VIT, **options)
        net.pretrained_cfg["input_size"] = (3, 32, 32)
        return net

    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", create)
    monkeypatch.setitem(train.MATRIX, "cpu", 64)


def test_each_model_is_set_beside_the_matrix_product(tiny_model, tmp_path, capsys):
    table, text = tmp_path / "out.csv", tmp_path / "out.json"
    words = ["bench", "train", "--rounds", "2", "--batch", "3", "--device", "cpu"]
    assert main([*words, "--csv", str(table), "--json", str(text)]) == 0
    shown, errors = capsys.readouterr()
    assert "large matrix product" in errors  # progress, now and then
    (row,) = [TrainRow(**row) for row in json.loads(text.read_text())]
    assert (row.bench, row.model, row.batch, row.mode) == ("train", "deit_tiny_patch16_224", 3, "eager")
    assert row.gmacs == pytest.approx(cost.model_cost(timm.create_model("x")).gmacs)
    assert row.pictures_per_second == pytest.approx(3_000 / row.step_ms)
    assert row.tflops == pytest.approx(3 * 2 * row.gmacs * row.pictures_per_second / 1e3)
    assert row.matmul_share == pytest.approx(row.tflops / row.matmul_tflops)
    assert f"{row.matmul_share:.1%}" in shown
    assert f"{row.matmul_tflops:,.3g} TFLOP/s" in shown
    with table.open(newline="") as file:
        (written,) = csv.DictReader(file)
    assert tuple(written) == columns(TrainRow)
    assert float(written["matmul_share"]) == pytest.approx(row.matmul_share, rel=1e-5)


def test_modes_are_arms_of_one_comparison(tiny_model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    rows = bench_train(["deit_tiny_patch16_224"], batch=2, rounds=2, modes=["eager", "compiled"], device=CPU)
    assert [row.mode for row in rows] == ["eager", "compiled"]
    assert rows[0].ratio == 1
    assert rows[0].matmul_tflops == rows[1].matmul_tflops


def test_the_products_speed_counts_two_operations_for_each_multiplication(monkeypatch):
    monkeypatch.setitem(train.MATRIX, "cpu", 100)
    now = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))  # a second for every five products
    assert matmul_rate(CPU) == pytest.approx(5 * 2 * 100**3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "deit_tniy_patch16_224"], "Did you mean 'deit_tiny_patch16_224'?"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--csv", "nowhere/x.csv"], "cannot write nowhere/x.csv"),
    ],
)
def test_a_mistake_is_said_before_anything_is_measured(words, message, capsys, monkeypatch):
    monkeypatch.setattr(train, "compare", lambda *arguments, **options: pytest.fail("measured"))
    assert main(["bench", "train", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_csv_of_another_bench_is_left_alone(tmp_path, capsys):
    file = tmp_path / "data.csv"
    file.write_text("bench,device\n")
    assert main(["bench", "train", "--csv", str(file)]) == 2
    assert "other columns" in capsys.readouterr().err
