"""The config of a run: the default one, the environment, warnings of the first rank."""

from kenotron_config import DEFAULT_CONFIG, dump_config, ignored_keys
from kenotron_train.config_file import load_config, parse_config

TEXT = DEFAULT_CONFIG.read_text(encoding="utf-8")


def test_default_is_a_small_model_on_two_ranks():
    config = load_config(DEFAULT_CONFIG)
    assert (config.world_size, config.global_batch_size, config.global_batch_tokens) == (
        2,
        16,
        2048,
    )
    assert config.data_stages[0].data.dataset.hf_dataset_or_datasets == "python-stdlib"
    assert ignored_keys(config) == []


def test_the_default_survives_a_round_trip():
    config = load_config(DEFAULT_CONFIG)
    assert parse_config(dump_config(config), "again") == config


def test_variables_are_those_of_the_process(monkeypatch, tmp_path):
    monkeypatch.setenv("KENOTRON_RUN", "mine")
    assert parse_config(TEXT, "c.yaml", ["general.run=!env KENOTRON_RUN"]).general.run == "mine"
    (tmp_path / "c.yaml").write_text(TEXT.replace("run: default", "run: !env KENOTRON_RUN"))
    assert load_config(tmp_path / "c.yaml").general.run == "mine"


def test_a_warning_is_printed_by_the_first_rank_alone(capsys, monkeypatch, tmp_path):
    (tmp_path / "c.yaml").write_text(TEXT.replace("  seed: 42\n", "  seed: 1\n  seed: 2\n", 1))
    assert load_config(tmp_path / "c.yaml").general.seed == 2
    said = capsys.readouterr().err
    assert said.startswith(f"Warning: {tmp_path}/c.yaml: the key seed is given in line ")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    load_config(tmp_path / "c.yaml")
    assert capsys.readouterr().err == ""
