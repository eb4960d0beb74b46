"""environment.json: what a run needs to be told apart, and no secret."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from danlu.monitor.environment import VARIABLES, commit, content, environment, redact, redact_arguments, secret

# Made up for this test; each has the form of the real thing.
CANARIES = (
    "hf_" + "AbCdEfGhIjKlMnOpQrStUvWx",
    "sk-" + "proj-0123456789abcdefABCDEF",
    "ghp_" + "0123456789abcdefABCDEF0123456789abcd",
    "AKIA" + "IOSFODNN7EXAMPLE",
    "pass-word-canary",
)


def facts(**changes: object) -> dict:
    return environment(
        device=torch.device("cpu"),
        world_size=2,
        precision="bf16",
        attention="flash",
        fallbacks=["fp16 was asked for; this device has none, so bf16 is used"],
        data_id="0a1b",
        **changes,  # type: ignore[arg-type]
    )


def test_it_tells_what_was_really_used():
    known = json.loads(content(facts(extra={"model": {"parameters": 3_000_000}})))
    assert known["versions"]["torch"] == torch.__version__
    assert known["device"]["kind"] == "cpu"
    assert known["device"]["name"]
    assert (known["precision"], known["attention"], known["world_size"], known["data_id"]) == (
        "bf16",
        "flash",
        2,
        "0a1b",
    )
    assert known["fallbacks"] == ["fp16 was asked for; this device has none, so bf16 is used"]
    assert known["model"] == {"parameters": 3_000_000}
    assert known["threads"] == torch.get_num_threads()


def test_no_secret_is_in_it_wherever_it_was_planted():
    token, key, git, aws, password = CANARIES
    known = content(
        facts(
            variables={"OMP_NUM_THREADS": "2", "HF_TOKEN": token, "MY_KEY": key, "NCCL_SOCKET_IFNAME": f"lo {git}"},
            arguments=[
                "danlu",
                "train",
                "demo",
                f"monitor.api_key={aws}",
                "--password",
                password,
                f"data.train=https://user:{password}@example.com/x.txt",
                "data.tokenizer=byte",
                "max_tokens=100",
            ],
            extra={"source": {"secret": password, "note": f"used {key} today"}},
        )
    ).decode()
    for canary in CANARIES:
        assert canary not in known
    assert "HF_TOKEN" not in known
    parsed = json.loads(known)
    assert parsed["variables"] == {"OMP_NUM_THREADS": "2", "NCCL_SOCKET_IFNAME": "lo ***"}
    assert "data.tokenizer=byte" in parsed["command"]
    assert "max_tokens=100" in parsed["command"]
    assert "data.train=https://***@example.com/x.txt" in parsed["command"]


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "api-key", "apiKey", "wandb.api_key", "--password", "AWS_SECRET_ACCESS_KEY"]
)
def test_names_of_secrets(name):
    assert secret(name)


@pytest.mark.parametrize(
    "name", ["tokenizer", "max_tokens", "tokens_per_second", "num_key_value_heads", "keyboard", ""]
)
def test_names_that_only_look_like_it(name):
    if name == "num_key_value_heads":
        # A word "key" is in it: hiding a number of heads would be silly, and numbers are never hidden.
        assert redact({name: 8}) == {name: 8}
    else:
        assert not secret(name)


def test_no_variable_that_could_hold_a_secret_is_on_the_list():
    assert not [name for name in VARIABLES if secret(name)]


def test_an_options_value_is_hidden_and_the_next_word_is_not():
    assert redact_arguments(["--token", "abc", "--seed", "1", "--hub-token=abc"]) == [
        "--token",
        "***",
        "--seed",
        "1",
        "--hub-token=***",
    ]


def git(folder, *words: str) -> str:
    names = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True, text=True).stdout


def test_the_commit_is_gits_and_says_when_files_differ_from_it(tmp_path):
    assert commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_text("one")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert commit(tmp_path) == head
    (tmp_path / "a.txt").write_text("two")
    assert commit(tmp_path) == f"{head}-dirty"
    inner = tmp_path / "site-packages"
    inner.mkdir()
    (inner / "b.txt").write_text("not git's")
    assert commit(inner) is None
