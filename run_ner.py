"""Fine-tune on named entities, or any labels of words, by the published recipe of the checkpoint.

    python run_ner.py --model_name_or_path microsoft/deberta-v3-base --task_name conll2003 --data_dir conll2003 \
        --output_dir conll

`--data_dir` holds train.txt, valid.txt and test.txt: a word per line, its label in the last column. Your own files,
CoNLL columns or jsonl and parquet with lists of words and labels, on several GPUs:

    accelerate launch run_ner.py --model_name_or_path microsoft/deberta-v3-large --train_file train.jsonl \
        --validation_file dev.jsonl --test_file test.jsonl --bf16 --output_dir mine

See it work, offline: `python run_ner.py --demo`. The same command goes on where it was stopped. Flags
are those of Transformers' `run_ner.py` and ours; --help lists all.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, EvalPrediction, set_seed
from transformers.utils import logging

from hf_deberta import HfDebertaForTokenClassification
from hf_deberta.demos.ner import write_ner_demo
from hf_deberta.fine_tuning.arguments import FineTuningArguments, run_with_arguments
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, read_splits
from hf_deberta.fine_tuning.task_model import (
    ModelArguments,
    checkpoint_labels,
    label_fields,
    labels_in_order,
    load_model,
    load_tokenizer,
    longest_input,
)
from hf_deberta.fine_tuning.tasks import ner
from hf_deberta.fine_tuning.tasks.ner import Sentence
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    evaluations_of,
    over_seeds,
    train_and_evaluate,
    write_card_and_push,
)
from hf_deberta.runs.data_files import read_table, require_columns

TABLES = (".json", ".jsonl", ".parquet", ".csv")

logger = logging.get_logger("run_ner")


@dataclass
class NerArguments(DataArguments):
    """Which data, and what is labelled of them."""

    task_name: str | None = field(default=None, metadata={"help": "conll2003, for its recipe; else your own."})
    text_column_name: str = field(default="tokens", metadata={"help": "The column of a table with lists of words."})
    label_column_name: str = field(default="ner_tags", metadata={"help": "The column with lists of their labels."})
    label_all_tokens: bool = field(
        default=False, metadata={"help": "Label every piece of a word; else the first, as the authors do."}
    )
    return_entity_level_metrics: bool = field(default=False, metadata={"help": "Report each type of entity too."})
    document_context: str | None = field(
        default=None,
        metadata={
            "help": "What a sentence sees of its document: none; merged (as many sentences as fit share an input, the "
            "authors' way for CoNLL-2003); around (words on both sides, the sentence alone is labelled). By default "
            "merged for conll2003 if the files tell documents apart, else none."
        },
    )
    token_classifier: str | None = field(
        default=None, metadata={"help": "linear, or projection: the authors' head, with a dense layer first."}
    )

    def __post_init__(self) -> None:
        self.task_name = self.task_name and self.task_name.lower().replace("-", "")
        if self.task_name not in (None, "conll2003"):
            raise ValueError(f"--task_name is conll2003, or left out for data of your own; not {self.task_name!r}")
        if self.document_context not in (None, *ner.CONTEXTS):
            raise ValueError(f"--document_context is one of {', '.join(ner.CONTEXTS)}, not {self.document_context!r}")


def main() -> None:
    kinds = (ModelArguments, NerArguments, SiftArguments, FineTuningArguments)
    run_with_arguments(kinds, lambda flags: "conll2003" if flags.task_name else "ner", write_ner_demo, fine_tune)


def fine_tune(
    model_args: ModelArguments, data_args: NerArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. Sentences and their labels
    hub = ("eriktks/conll2003", None) if data_args.task_name else None
    loading = model_args.downloads()
    if data_args.dataset_name is None:
        loading["revision"] = "refs/convert/parquet"  # the data set itself is a script, which is no longer run
    splits = {
        split: sentences_of(rows, split, data_args)
        for split, rows in read_splits(data_args, hub, read_file, loading).items()
        if split != "train" or args.do_train
    }
    args.drop_missing_splits(splits)
    labels = ner.label_names(splits["train"]) if args.do_train else checkpoint_labels(model_args)
    if labels is None:
        raise ValueError(f"{model_args.start} is a model of numbers, not of labels")
    labels = list(labels_in_order(tuple(labels), model_args))
    for split, sentences in splits.items():
        ner.require_known_labels(sentences, labels, split)
        words = sum(len(sentence.words) for sentence in sentences)
        logger.warning(f"{split}: {len(sentences):,} sentences, {words:,} words")
    if data_args.document_context is None:
        known = all(sentence.document is not None for sentences in splits.values() for sentence in sentences)
        data_args.document_context = "merged" if known and data_args.task_name == "conll2003" else "none"
    logger.warning(f"labels: {', '.join(labels)}; document context: {data_args.document_context}")
    args.set_best_metric(ner.metric_names(labels, data_args.return_entity_level_metrics))

    # 2. Fine-tuning, evaluation, predictions: with one seed or several
    over_seeds(args, lambda one: run(model_args, data_args, sift_args, one, labels, splits))


def read_file(file: str) -> Dataset:
    """Rows of a table, or the sentences of a CoNLL file as such rows."""
    path = Path(file)
    if Path(path.name.removesuffix(".gz")).suffix.lower() in TABLES:
        return read_table(file)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    sentences = ner.read_conll(path)
    columns = {"tokens": [s.words for s in sentences], "document_id": [s.document for s in sentences]}
    if sentences[0].tags is not None:
        columns["ner_tags"] = [s.tags for s in sentences]
    return Dataset.from_dict(columns)


def sentences_of(rows: Dataset, split: str, args: NerArguments) -> list[Sentence]:
    """Sentences with tags in IOB2; test sentences may come without."""
    tags, tokens = args.label_column_name, args.text_column_name
    if tags not in rows.column_names:
        if split.startswith("test"):
            tags = None
        elif rows.column_names == ["tokens", "document_id"]:  # as read_file has it
            raise ValueError(f"the {split} file holds words alone: a line should be a word and its label, 'EU B-ORG'")
    require_columns(rows, [tokens, *[tags] * (tags is not None)], split)
    names = None if tags is None else getattr(getattr(rows.features[tags], "feature", None), "names", None)
    try:
        return ner.convert_to_iob2(ner.sentences_from_table(rows, tokens, tags, names))
    except ValueError as error:
        raise ValueError(f"the {split} split: {error}") from error


def run(
    model_args: ModelArguments,
    data_args: NerArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    labels: list[str],
    splits: dict[str, list[Sentence]],
) -> dict[str, float]:
    # 1. Model and tokenizer
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args, add_prefix_space=True)
    fields = label_fields(labels)
    if data_args.token_classifier is not None:
        fields["token_classifier"] = data_args.token_classifier
    model = load_model(model_args, HfDebertaForTokenClassification, AutoModelForTokenClassification, **fields)

    # 2. Sentences as inputs
    length = longest_input(data_args, tokenizer, model.config)
    with args.main_process_first(desc="tokenizing"):
        inputs = {split: windows(rows, split, tokenizer, labels, length, data_args) for split, rows in splits.items()}
    evaluations = evaluations_of(inputs)
    padding = {"padding": "max_length", "max_length": length} if data_args.pad_to_max_length else {}

    # 3. Training and evaluation
    trainer = NerTrainer(
        model=model,
        args=args,
        sift=sift_args,
        train_dataset=inputs.get("train"),
        eval_dataset=evaluations.get(""),
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(
            tokenizer, pad_to_multiple_of=8 if args.fp16 or args.bf16 else None, **padding
        ),
        about={"data": data_args.source(model_args.demo), "base": model_args.start},
        sentences={id(rows): splits[split] for split, rows in inputs.items()},
        by_type=data_args.return_entity_level_metrics,
    )
    found = train_and_evaluate(trainer, evaluations)

    # 4. Predictions
    if args.do_predict:
        for split in (split for split in inputs if split.startswith("test")):
            prefix = split.replace("test", "predict", 1)
            predicted = trainer.predict(inputs[split], metric_key_prefix=prefix)
            if "labels" in inputs[split].column_names:
                trainer.log_metrics(prefix, predicted.metrics)
                trainer.save_metrics(prefix, predicted.metrics)
            if trainer.is_world_process_zero():
                tags = ner.predicted_tags(predicted.predictions, inputs[split], splits[split], labels)
                ner.write_conll_predictions(Path(args.output_dir) / f"predictions_{split}.txt", splits[split], tags)
    write_card_and_push(trainer)
    return found


def windows(
    sentences: list[Sentence], split: str, tokenizer: Any, labels: list[str], length: int, args: NerArguments
) -> Dataset:
    """Inputs of the model, with the words that each labels."""
    rows = Dataset.from_list(list(ner.group_sentences(sentences, args.document_context)))

    def encoded(batch: dict[str, list]) -> dict[str, list]:
        return ner.encode_sentences(batch, tokenizer, labels, length, args.document_context, args.label_all_tokens)

    found = rows.map(encoded, remove_columns=rows.column_names, **args.mapping(f"tokenizing {split}"))
    cut = sum(found["is_partial"])
    if cut:
        logger.warning(f"{split}: sentences longer than --max_seq_length {length} were cut into {cut:,} windows")
    return found


class NerTrainer(FineTuningTrainer):
    """Scores whole entities of whole sentences, whatever windows they were cut into.

    Args:
        sentences: those of a data set, by its id().
        by_type: whether to report each type of entity.
    """

    def __init__(self, *args, sentences: dict[int, list[Sentence]], by_type: bool = False, **kwargs):
        super().__init__(*args, preprocess_logits_for_metrics=best_labels, compute_metrics=self.scores, **kwargs)
        self.sentences, self.by_type = sentences, by_type

    def scores(self, found: EvalPrediction) -> dict[str, float]:
        labels = list(self.model.config.id2label.values())
        sentences = self.sentences[id(self.evaluated)]
        tags = ner.predicted_tags(found.predictions, self.evaluated, sentences, labels)
        scores = ner.entity_scores([sentence.tags for sentence in sentences], tags)
        types = scores.pop("types", {})
        if self.by_type:
            scores |= {f"{kind}_{name}": value for kind, of in types.items() for name, value in of.items()}
        return scores


def best_labels(logits: Any, labels: Any) -> Any:
    """Label numbers [B, N], which take less memory than logits."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


if __name__ == "__main__":
    main()
