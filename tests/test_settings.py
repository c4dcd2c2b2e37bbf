"""Section settings: strict values, all faults at once, secrets never shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pidispatch


def load(**environ: str) -> pidispatch.Settings:
    return pidispatch.load_settings(environ, None)


def test_nothing_set_gives_the_documented_defaults() -> None:
    settings = load()
    assert settings.concurrency == 3
    assert settings.daily_cap == 25
    assert settings.bind == "0.0.0.0"
    assert settings.panel_bind == "127.0.0.1"
    assert settings.isolated


@pytest.mark.parametrize(
    "text", ["3x", "03", "-1", "0", "", "1.0", "\u0661", "1_000", "9" * 40]
)
def test_integers_are_strict(text: str) -> None:
    with pytest.raises(pidispatch.Faults, match="PI_CONCURRENCY"):
        load(PI_CONCURRENCY=text)


def test_surrounding_blanks_of_an_integer_are_forgiven() -> None:
    assert load(PI_DAILY_CAP=" 7 ").daily_cap == 7


def test_every_wrong_value_is_named_in_one_go() -> None:
    with pytest.raises(pidispatch.Faults) as caught:
        load(PI_CONCURRENCY="x", PI_DAILY_CAP="0", PI_TIMEZONE="Mars/Base", PI_BIND="")
    named = [fault.split("=")[0] for fault in caught.value.faults]
    assert sorted(named) == ["PI_BIND", "PI_CONCURRENCY", "PI_DAILY_CAP", "PI_TIMEZONE"]
    assert caught.value.exit_code == 2


def test_an_empty_secret_is_an_error_and_its_value_is_never_shown() -> None:
    """T05: an empty secret must not mean that nothing is checked."""
    with pytest.raises(pidispatch.Faults) as caught:
        load(WEBHOOK_SECRET=" , ", GITHUB_API_URL="https://user:canary@host/")
    assert any("WEBHOOK_SECRET" in fault for fault in caught.value.faults)
    with pytest.raises(pidispatch.Faults) as caught:
        load(GITHUB_PAT="  ", PANEL_TOKEN="")
    assert "…" in str(caught.value)


def test_only_exactly_zero_opens_the_network() -> None:
    assert not load(PI_EGRESS="0").isolated
    for text in ("00", "false", "no", "off", "1"):
        assert load(PI_EGRESS=text).isolated


def test_the_environment_wins_over_dotenv(tmp_path: Path) -> None:
    dotenv = tmp_path / ".env"
    dotenv.write_text("PI_DAILY_CAP=5\nPI_PORT=8000\nANTHROPIC_API_KEY=k\n")
    settings = pidispatch.load_settings({"PI_DAILY_CAP": "6"}, dotenv)
    assert (settings.daily_cap, settings.port) == (6, 8000)
    assert settings.keys == {"anthropic": "k"}


def test_secrets_rotate_as_a_list() -> None:
    assert load(WEBHOOK_SECRET="old,new").webhook_secret == ("old", "new")


LOCAL: dict[str, Any] = {
    "baseUrl": "http://127.0.0.1:9/v1",
    "style": "openai-completions",
    "keyVariable": "LOCAL_KEY",
}


def test_a_providers_file_adds_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "providers.json"
    path.write_text(json.dumps({"providers": {"local": LOCAL}}))
    settings = load(PI_PROVIDERS_FILE=str(path), LOCAL_KEY="k")
    assert settings.providers["local"].auth_prefix == "Bearer "
    assert settings.keys == {"local": "k"}
    assert "anthropic" in settings.providers


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"style": "openai-completions", "keyVariable": "K"}, "baseUrl"),
        (
            {"baseUrl": "ftp://x", "style": "openai-completions", "keyVariable": "K"},
            "http",
        ),
        ({"baseUrl": "http://x", "style": "soap", "keyVariable": "K"}, "style"),
        (
            {"baseUrl": "http://x", "style": "soap", "keyVariable": "K", "z": 1},
            "allowed",
        ),
        ("text", "allowed"),
        (LOCAL | {"models": ["m"]}, "id"),
        (LOCAL | {"models": [{"id": 7}]}, "id"),
        (LOCAL | {"models": [{"id": "m", "cost": "free"}]}, "cost of m"),
        (LOCAL | {"models": [{"id": "m", "cost": {"input": "3"}}]}, "cost of m"),
        (LOCAL | {"models": [{"id": "m", "cost": {"input": -1}}]}, "cost of m"),
        (LOCAL | {"models": [{"id": "m", "cost": {"input": True}}]}, "cost of m"),
    ],
)
def test_a_wrong_provider_row_is_named(tmp_path: Path, row: object, word: str) -> None:
    path = tmp_path / "providers.json"
    path.write_text(json.dumps({"providers": {"mine": row}}))
    with pytest.raises(pidispatch.Faults) as caught:
        load(PI_PROVIDERS_FILE=str(path))
    assert "providers.mine" in str(caught.value)
    assert word in str(caught.value)


def overlay(tmp_path: Path, content: str) -> pidispatch.Settings:
    path = tmp_path / "overlay.json"
    path.write_text(content)
    return pidispatch.with_overlay(load(PI_SETTINGS_FILE=str(path)))


def test_the_overlay_changes_caps_and_model_of_the_next_job(tmp_path: Path) -> None:
    settings = overlay(tmp_path, '{"daily_cap": 3, "model": "m"}')
    assert (settings.daily_cap, settings.model) == (3, "m")


def test_an_absent_overlay_is_no_overlay(tmp_path: Path) -> None:
    settings = load(PI_SETTINGS_FILE=str(tmp_path / "none.json"))
    assert pidispatch.with_overlay(settings) is settings


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"db": "x"}', '{"daily_cap": "3x"}', '{"daily_cap": true}']
)
def test_a_wrong_overlay_is_a_refusal_by_name(tmp_path: Path, content: str) -> None:
    with pytest.raises(pidispatch.Refused) as caught:
        overlay(tmp_path, content)
    assert caught.value.reason == "settings-overlay-invalid"
