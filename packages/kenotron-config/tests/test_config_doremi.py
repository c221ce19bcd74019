"""The section `doremi`: Nanotron's shapes, the shares of domains, and what contradicts them."""

import json
from pathlib import Path

import pytest
import yaml

from kenotron_config import (
    Config,
    ConfigError,
    dump_config,
    ignored_keys,
    parse_config,
    unavailable,
)

BASE = yaml.safe_load(Path(__file__).with_name("tiny_llama.yaml").read_text(encoding="utf-8"))
NAMES = "Pile-CC, Wikipedia (en),ArXiv"
REFERENCE = "doremi.ref_model_resume_checkpoint_path=runs/reference/100"


def parse(*overrides: str, **doremi: object) -> Config:
    data = json.loads(json.dumps(BASE)) | {"doremi": {"domain_names": NAMES, **doremi}}
    return parse_config(yaml.safe_dump(data), "c.yaml", overrides)


def problem(*overrides: str, **doremi: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(*overrides, **doremi)
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize("names", [NAMES, ["Pile-CC", "Wikipedia (en)", "ArXiv"]])
@pytest.mark.parametrize("weights", ["0.5, 0.25,0.25", [0.5, 0.25, 0.25]])
def test_nanotrons_shapes_load_and_can_be_run(names: object, weights: object) -> None:
    config = parse(domain_names=names, domain_weights=weights)
    assert parse_config(dump_config(config), "again") == config and not unavailable(config)
    doremi = config.doremi
    assert doremi is not None and not doremi.is_proxy
    assert doremi.shares == {"Pile-CC": 0.5, "Wikipedia (en)": 0.25, "ArXiv": 0.25}


def test_a_proxy_names_its_reference_and_reads_even_shares_by_default() -> None:
    doremi = parse(REFERENCE, "doremi.step_size=0.5", "doremi.smoothing_param=0.01").doremi
    assert doremi is not None and doremi.is_proxy
    assert (doremi.step_size, doremi.smoothing_param) == (0.5, 0.01)
    assert list(doremi.shares.values()) == [1 / 3] * 3


def test_what_learning_needs_is_ignored_where_nothing_is_learned() -> None:
    given = {"step_size": 0.5, "smoothing_param": 0.01, "reference_losses_path": "losses"}
    lines = [line for line in ignored_keys(parse(**given)) if line.startswith("doremi.")]
    assert sorted(line.split(":")[0] for line in lines) == sorted(f"doremi.{key}" for key in given)
    assert not [line for line in ignored_keys(parse(REFERENCE, **given)) if "doremi" in line]


def test_one_data_set_is_a_folder_of_domains() -> None:
    section = parse().section_of(0)
    assert section is not None
    found = section.hf_dataset_or_datasets
    assert found == [f"corpus.txt/{name.strip()}" for name in NAMES.split(",")]
    plain = parse_config(yaml.safe_dump(BASE), "c.yaml")
    assert plain.section_of(0) is plain.data_stages[0].data.dataset


PILE = (
    "Pile-CC, Github, OpenWebText2, StackExchange, Wikipedia (en), PubMed Abstracts, "
    "USPTO Backgrounds, FreeLaw, PubMed Central, Enron Emails, HackerNews, NIH ExPorter, Books3, "
    "ArXiv, DM Mathematics, OpenSubtitles, Gutenberg (PG-19), Ubuntu IRC, BookCorpus2, EuroParl, "
    "YoutubeSubtitles, PhilPapers"
)
TUNED = (
    "0.2333, 0.0700, 0.1154, 0.0528, 0.0665, 0.0670, 0.0366, 0.0571, 0.0451, 0.0036, 0.0087, "
    "0.0078, 0.0708, 0.0656, 0.0034, 0.0048, 0.0222, 0.0084, 0.0038, 0.0186, 0.0149, 0.0235"
)


def test_nanotrons_files_of_the_pile_load() -> None:
    data = json.loads(json.dumps(BASE))
    (first, *_) = data.pop("data_stages")
    dataset = first["data"]["dataset"] | {"hf_dataset_or_datasets": "/data/the_pile"}
    data["data"] = {"dataset": dataset, "num_loading_workers": 1, "seed": 42}
    for more in ({"domain_weights": TUNED}, {"ref_model_resume_checkpoint_path": "/ref/70000"}):
        section = {"smoothing_param": 1e-3, "step_size": 1.0, "domain_names": PILE} | more
        config = parse_config(yaml.safe_dump(data | {"doremi": section}), "c.yaml")
        assert config.doremi is not None and len(config.doremi.shares) == 22
        read = config.section_of(0)
        assert read.hf_dataset_or_datasets[4] == "/data/the_pile/Wikipedia (en)"


SUM = "0.5, 0.3, 0.3 was given, with the sum 1.1; it must be 1 (to 0.001): for the same"
WRONG = [
    ("domain_weights", "0.5,0.3,0.3", SUM),
    ("domain_weights", [0.5, 0.3, 0.3], SUM),
    ("domain_weights", [0.5, 0.3, 0.3], "proportions give 0.4545, 0.2727, 0.2727"),
    ("domain_weights", [0, 0, 0], "for the same proportions give equal ones"),
    ("domain_weights", [0.5, 0.5], "2 weights were given; domain_names has 3 domains: give one"),
    ("domain_weights", [1.5, -0.5, 0.0], "-0.5 was given; a weight is a finite number from 0 on"),
    ("domain_weights", "0.5,half,0.3", "it must be numbers with commas between"),
    ("domain_names", "a,,b", "it must name at least two domains, each once and none empty"),
    ("domain_names", ["a", "a", "b"], "each once and none empty"),
    ("domain_names", "a", "'a' was given; it must name at least two domains"),
    ("smoothing_param", 1.0, "1.0 was given; it must be from 0 to below 1"),
    ("step_size", 0.0, "0.0 was given; it must be finite and above 0"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), WRONG)
def test_one_wrong_value_is_one_sentence(key: str, value: object, sentence: str) -> None:
    line = problem(**{key: value})
    assert line.startswith(f"c.yaml: doremi.{key}: ") and sentence in line


CROSS = [
    (
        (REFERENCE, "doremi.domain_weights=[0.5, 0.5, 0]"),
        "doremi.domain_weights: 0 was given for 'ArXiv'; a proxy run learns",
    ),
    (
        ("data_stages.1.data.dataset=null",),
        "data_stages.1.data.dataset: null was given; doremi needs a data set for each of its 3",
    ),
    (
        ("data_stages.0.data.dataset.hf_dataset_or_datasets=[a, b]",),
        "hf_dataset_or_datasets: 2 data sets were given; doremi.domain_names has 3 domains",
    ),
    (
        ("data_stages.0.data.dataset={dataset_folder: [a, b, c], dataset_weights: [1, 2, 3]}",),
        "dataset_weights: weights were given; doremi.domain_weights has the weights of domains",
    ),
    (
        ("data_stages.0.data.dataset={dataset_folder: {a: 1, b: 2, c: 3}}",),
        "dataset_folder: weights were given; doremi.domain_weights has the weights of domains",
    ),
    (
        (REFERENCE, "model.cuda_graph=true"),
        "model.cuda_graph: true was given with doremi.ref_model_resume_checkpoint_path",
    ),
]


@pytest.mark.parametrize(("overrides", "sentence"), CROSS)
def test_what_contradicts_domains_is_one_sentence(
    overrides: tuple[str, ...], sentence: str
) -> None:
    assert sentence in problem(*overrides)
