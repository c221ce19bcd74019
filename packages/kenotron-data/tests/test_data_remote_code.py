"""Code that comes with a tokenizer is not run."""

import json

import pytest

from kenotron_data.tokenizer import open_transformers


def test_a_tokenizer_runs_no_code_and_asks_nobody(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "evil"}')
    told, load = [], transformers.AutoTokenizer.from_pretrained

    def loads(*given, **options):
        told.append(options.get("trust_remote_code"))
        return load(*given, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", loads)
    with pytest.raises(ValueError, match="transformers cannot open it"):
        open_transformers(str(tmp_path))
    assert told == [False] and not (tmp_path / "ran").exists()
