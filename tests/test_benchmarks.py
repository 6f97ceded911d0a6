"""Peers of the benchmarks compute what their model computes, and tables take ratios from one machine at a time."""

import csv
import shlex
import sys

import pytest
import torch
import transformers

from hf_deberta import HfDebertaConfig
from hf_deberta.pretraining.tokenizer_training import train_tokenizer


def tiny_in_tree() -> transformers.DebertaV2Model:
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        relative_attention=True,
        position_buckets=8,
        max_position_embeddings=32,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
        type_vocab_size=0,
    )
    return transformers.DebertaV2Model(config).eval()


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-5), ("int8", 0.2)])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_runners_compute_what_the_model_computes(load, runtime, dtype, limit):
    runtimes = load("runtimes")
    for module in runtimes.MODULES[runtime]:
        pytest.importorskip(module)
    model = tiny_in_tree()
    ids = torch.randint(5, 60, (3, 20))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected = model(**inputs)[0][mask.bool()]
    runners = list(runtimes.all_runners(f"{runtime} in-tree", model, (3, 20), dtype, runtimes.Graphs()))
    assert len({runner.settings for runner in runners}) == len(runners)
    for runner in runners:
        states = runner(**inputs)[0][mask.bool()]
        if "bfloat16" in runner.settings and not states.isfinite().all():
            continue  # of OpenVINO, on some processors; fastest_runner leaves it out
        assert (states - expected).abs().max() < limit, runner.settings
    states = runtimes.fastest_runner(f"{runtime} in-tree", model, inputs, dtype, runtimes.Graphs())(**inputs)[0]
    assert (states[mask.bool()] - expected).abs().max() < limit


def test_onnx_runtime_has_no_bfloat16(load):
    runtimes = load("runtimes")
    with pytest.raises(ValueError, match="bfloat16"):
        list(runtimes.all_runners("onnxruntime in-tree", None, (1, 8), "bfloat16", runtimes.Graphs()))


def test_ratios_are_taken_on_one_machine_at_a_time(load, tmp_path, monkeypatch):
    table = load("table")
    optimized = {"ours optimized": 10, "ours optimized, fixed shape": 8}
    runtimes = {"openvino in-tree": 12, "openvino in-tree, any shape": 13}
    times = {
        "A, 2 threads": {"in-tree": 40, "ours sdpa": 20, **optimized, **runtimes},
        "B, 2 threads": {"in-tree": 90, "ours sdpa": 30, "onnxruntime in-tree": 60},
    }
    names = ("machine", "peer", "milliseconds", "mode", "case", "dtype", "device")
    with (tmp_path / "encoder.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for machine, by_peer in times.items():
            for peer, time in by_peer.items():
                writer.writerow((machine, peer, time, "forward", "1x32", "float32", "cpu"))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    lines = table.ratio_table().splitlines()
    assert lines[2] == "| 1 row of 32 tokens, float32 | 2.0 to 3.0 (2) | 4.0 (1) | 1.3 (1) | 1.5 (1) | - |"
    assert lines[-2:] == ["- A, 2 threads", "- B, 2 threads"]


def test_the_drawing_comes_from_the_results(load):
    figure = load("figure")
    assert figure.TARGET.read_text(encoding="utf-8") == figure.figure(), "run python benchmarks/figure.py"


def test_operations_and_parameters_beside_bert(load):
    sizes = load("model_sizes")
    config = HfDebertaConfig.from_preset("v3-base", vocab_size=1000)
    bert = transformers.BertConfig(vocab_size=1000, type_vocab_size=1)
    with torch.device("meta"):
        expected = transformers.BertForMaskedLM(bert).num_parameters()
    measured = sizes.measure(HfDebertaConfig.from_preset("v3-base", vocab_size=1000, **sizes.BERT), 512)
    assert measured.parameters == expected - 768  # BERT's embedding of token types
    assert measured.encoder == 12 * (2 * 12 * 768**2 + 2 * 2 * 512 * 768)
    deberta = sizes.measure(config, 512)
    projections = 2 * 12 * 2 * 512 * 768**2 / 512  # of the table's 512 rows, for keys and queries
    assert deberta.encoder - measured.encoder == 12 * 2 * 2 * 512 * 768 + projections


def test_rows_of_rtd_become_a_table(load, tmp_path, monkeypatch, capsys):
    ablations = load("ablations")
    for module in ("table", "timing", "ablations"):
        monkeypatch.setattr(f"{module}.RESULTS", tmp_path)
    found = {"1": "0.2", "2": "0.4"}
    runs = [{"experiment": "scratch", "embedding_sharing": "gdes", "seed": seed, "setting": "small"} for seed in found]
    scores = {"step": "100", **dict.fromkeys(ablations.RTD_METRICS, "0.9")}
    measured = lambda run: [{**scores, "replaced_found": found[run["seed"]]}]  # noqa: E731
    ablations.record_runs("rtd.csv", runs, measured, again=False)
    ablations.print_tables(ablations.EXPERIMENTS["rtd"], "small")
    assert "| gdes | 100 | 2 | 0.300 (0.200 to 0.400) | 0.900 (0.900 to 0.900) |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, flags, skipped",
    [
        ("ablations", "parts --train_file t --validation_file v --variants DeBERTa", 3),
        ("ablations", "rtd --train_file t --validation_file v", 9),
        ("fine_tuning", "--model v3-xsmall-nli --data d --tasks cola --settings short --who ours", 3),
        ("sift", "--tasks rte --name 'a DeBERTa-v3-xsmall fine-tuned on NLI (int8 weights multiplied out)'", 10),
    ],
)
def test_recorded_runs_are_counted_and_repeated_on_request(load, monkeypatch, capsys, name, flags, skipped):
    script, measured = load(name), {"date": "today"}  # a column of all files
    monkeypatch.setattr("timing.write_rows", None)  # results stay as they are
    monkeypatch.setattr(script, "prepare", lambda *_: None, raising=False)
    trained = [measured | ({"step": "0"} if flags.startswith("rtd") else {})] if name == "ablations" else measured
    monkeypatch.setattr(script, "train", lambda *_: trained)
    for again, expected in (([], f"{skipped} runs skipped, recorded 2026-11-2"), (["--again"], "today (recorded 202")):
        monkeypatch.setattr(sys, "argv", [name, *shlex.split(flags), *again])
        script.main()
        assert capsys.readouterr().out.count(expected) == (skipped if again else 1)


def test_a_token_file_of_a_large_text(load, tmp_path, monkeypatch):
    token_file = load("token_file")
    lines = [f"the old man number {number} walked to a quiet harbour" for number in range(50)]
    (tmp_path / "book.txt").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr("hf_deberta.pretraining.corpus.DOCUMENTS_PER_BATCH", 7)
    size = token_file.write_text([str(tmp_path / "book.txt")], tmp_path / "text.jsonl", 1e-5)
    text = (tmp_path / "text.jsonl").read_text()
    assert 10_000 <= size < 11_000
    (tmp_path / "text.jsonl").write_text(text + text)
    train_tokenizer(lines, 300, "bpe").save_pretrained(tmp_path / "tokenizer")
    result = token_file.tokenize(tmp_path / "text.jsonl", str(tmp_path / "tokenizer"), deduplicate=True)
    assert result["documents"] == result["duplicates"] == text.count("\n")
    assert result["peak_mb"] > 0 and result["tokens"] > result["documents"]
