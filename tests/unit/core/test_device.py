"""Facts about devices, on a machine that may have no GPU."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from danlu.core import device
from danlu.core.errors import InputError


def test_the_cpu_is_always_there_and_stands_last():
    assert device.available()[-1] == "cpu"
    assert device.choose("cpu") == torch.device("cpu")
    assert device.choose() == device.choose(device.available()[0])


def test_a_broken_driver_is_no_driver(monkeypatch):
    def broken():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(torch.backends.mps, "is_available", broken)
    assert device.available() == ("cpu",)


@pytest.mark.parametrize("name", ["cuda", "cuda:3", "gpu", "tpu:0"])
def test_a_device_that_is_not_here_is_refused_with_what_is(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"cpu"):
        device.choose(name)


# Streaming multiprocessors (or compute units) x boost clock in GHz x FLOP per unit and clock, all from the makers'
# architecture papers and not from the figures in the table.
@pytest.mark.parametrize(
    ("name", "units", "clock", "flop"),
    [
        ("Tesla V100-SXM2-32GB", 80, 1.53, 1024),
        ("Tesla T4", 40, 1.59, 1024),
        ("NVIDIA A100-SXM4-80GB", 108, 1.41, 2048),
        ("NVIDIA H100 80GB HBM3", 132, 1.83, 4096),
        ("NVIDIA H200", 132, 1.83, 4096),
        ("NVIDIA GeForce RTX 3090", 82, 1.695, 512),
        ("NVIDIA GeForce RTX 4090", 128, 2.52, 512),
        ("NVIDIA GeForce RTX 5090", 170, 2.407, 512),
        ("AMD Instinct MI300X", 304, 2.1, 2048),
    ],
)
def test_known_peaks_are_units_times_clock_times_width(name, units, clock, flop):
    assert device.known_peak(name, torch.float16) == pytest.approx(units * clock * 1e9 * flop, rel=0.02)


def test_what_is_not_in_the_table_is_unknown_rather_than_wrong():
    for name in (
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "Some GPU of tomorrow",
    ):
        assert device.known_peak(name, torch.bfloat16) is None
    assert device.known_peak("Tesla V100-SXM2-32GB", torch.bfloat16) is None  # it has no such unit
    assert device.known_peak("NVIDIA H100 PCIe", torch.int32) is None


def test_fp32_counts_as_tf32_only_where_torch_may_use_it():
    name = "NVIDIA A100-SXM4-40GB"
    assert device.known_peak(name, torch.float32) == 19.5e12
    assert device.known_peak(name, torch.float32, tf32=True) == 156e12
    assert device.known_peak("Tesla T4", torch.float32, tf32=True) == 8.1e12  # no such unit: its plain rate


def test_a_cpus_peak_is_measured_once_and_is_a_product_it_can_do():
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    peak = device.peak_flops(cpu, torch.float32)
    assert peak is not None
    assert peak == device.measure_peak(torch.float32, threads)  # kept, not measured again
    assert 1e8 < peak < 1e14  # from a phone's core to the largest server
    assert device.measure_peak(torch.bool, threads) is None


def test_memory_and_names_are_the_systems():
    cpu = torch.device("cpu")
    memory = device.memory(cpu)
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.free <= memory.total
    assert device.memory_peak(cpu) is None
    assert device.abilities(cpu).name
    assert device.backend_for(cpu) == "gloo"
    assert device.backend_for(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    device.synchronize(cpu)


def test_gauges_of_a_gpu_that_is_not_there_show_nothing_and_raise_nothing():
    gauges = device.Gauges(torch.device("cuda", 7))
    if not torch.cuda.is_available():
        assert gauges.use() is None
        assert gauges.watts() is None


def test_the_cpus_gauges_show_this_process():
    gauges = device.Gauges(torch.device("cpu"))
    assert gauges.resident() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert gauges.held() is None
    use = gauges.use()
    assert use is not None
    assert 0 <= use <= 1


def package(root: Path, name: str, microjoules: int) -> Path:
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "energy_uj").write_text(f"{microjoules}\n")
    return root / name / "energy_uj"


def test_power_is_energy_over_time_of_all_packages_and_of_nothing_within_them(tmp_path):
    first = package(tmp_path, "intel-rapl:0", 5_000_000)
    second = package(tmp_path, "intel-rapl:1", 1_000_000)
    part = package(tmp_path, "intel-rapl:0:0", 3_000_000)  # a part of package 0, already in its sum
    now = [10.0]
    energy = device.Energy(tmp_path, clock=lambda: now[0])
    now[0] = 12.0
    first.write_text("25000000")
    part.write_text("9000000")
    second.write_text("11000000")
    assert energy.watts() == pytest.approx((20 + 10) / 2)
    now[0] = 13.0
    first.write_text("10")  # the counter went round
    assert energy.watts() is None
    now[0] = 14.0
    first.write_text("7000010")
    assert energy.watts() == pytest.approx(7.0)


def test_without_counters_power_is_unknown(tmp_path):
    assert device.Energy(tmp_path).watts() is None
    assert device.Energy(tmp_path / "none").watts() is None
