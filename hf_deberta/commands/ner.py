r"""Fine-tune on named entities, or other labels of words, with the published settings for the checkpoint.

CoNLL-2003, from a folder with train.txt, valid.txt and test.txt (a word per line, its label in the last column):

    hf-deberta ner --model_name_or_path microsoft/deberta-v3-base --task_name conll2003 --data_dir conll2003 \
        --output_dir conll

Your own files, as CoNLL columns, or as jsonl or parquet with lists of words and labels, on several GPUs:

    accelerate launch -m hf_deberta.commands.ner \
        --model_name_or_path microsoft/deberta-v3-large --train_file train.jsonl \
        --validation_file dev.jsonl --test_file test.jsonl --bf16 --output_dir mine

A demonstration on made-up rows, offline:

    hf-deberta ner --demo

Repeat the command to resume an interrupted run; --demo starts over. The flags are those of Transformers'
run_ner.py, and the groups below.
"""

from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import logging

from hf_deberta import HfDebertaForTokenClassification
from hf_deberta.demos.ner import write_ner_demo
from hf_deberta.fine_tuning.arguments import FineTuningArguments, run_script
from hf_deberta.fine_tuning.ensemble import EnsembleTask, Scores
from hf_deberta.fine_tuning.sift import SiftArguments
from hf_deberta.fine_tuning.splits import DataArguments, hash_rows, read_splits
from hf_deberta.fine_tuning.task_model import (
    ModelArguments,
    checkpoint_labels,
    label_fields,
    labels_in_checkpoint_order,
    load_model,
    load_tokenizer,
    max_input_length,
)
from hf_deberta.fine_tuning.tasks import ner
from hf_deberta.fine_tuning.tasks.ner import Sentence
from hf_deberta.fine_tuning.trainer import (
    FineTuningTrainer,
    logits_of,
    over_seeds,
    prediction_splits,
    save_prediction_metrics,
    scored_splits,
    train_and_evaluate,
    write_card_and_push,
)
from hf_deberta.metrics import compute_metric
from hf_deberta.runs.data_files import read_table, require_columns, source_of
from hf_deberta.runs.errors import InputError, input_errors

TABLE_SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")

logger = logging.get_logger(__name__)


@dataclass
class NerArguments(DataArguments):
    """Which sentences, how they are labelled, and how much of their document the model sees."""

    task_name: str | None = field(
        default=None, metadata={"help": "conll2003, for its recipe. Leave it out for your own data."}
    )
    text_column_name: str = field(default="tokens", metadata={"help": "Column of a table with lists of words."})
    label_column_name: str = field(default="ner_tags", metadata={"help": "Column with the lists of their labels."})
    label_all_tokens: bool = field(default=False, metadata={"help": "Label every token of a word, not only the first."})
    return_entity_level_metrics: bool = field(
        default=False, metadata={"help": "Report the metrics of each entity type too."}
    )
    document_context: str | None = field(
        default=None,
        metadata={
            "help": "What a sentence sees of its document. none; merged: as many sentences as fit share an input, as "
            "in the official code for CoNLL-2003; around: neighbouring words on both sides, without labels. By "
            "default merged for conll2003 if the files mark documents, else none."
        },
    )
    token_classifier: str | None = field(
        default=None,
        metadata={"help": "Classifier: linear, or projection, the official one with a dense layer before it."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task_name = None if self.task_name is None else self.task_name.lower().replace("-", "")
        if self.task_name not in (None, "conll2003"):
            raise InputError(f"--task_name must be conll2003, or left out for your own data, not {self.task_name!r}")
        if self.document_context not in (None, *ner.CONTEXTS):
            raise InputError(
                f"--document_context must be one of {', '.join(ner.CONTEXTS)}, not {self.document_context!r}"
            )


def recipe_task(flags: Namespace) -> str:
    return "conll2003" if flags.task_name else "ner"


def main() -> None:
    argument_classes = (ModelArguments, NerArguments, SiftArguments, FineTuningArguments)
    run_script(argument_classes, fine_tune, recipe_task, write_ner_demo)


def fine_tune(
    model_args: ModelArguments, data_args: NerArguments, sift_args: SiftArguments, args: FineTuningArguments
) -> None:
    # 1. Sentences and labels
    hub = ("eriktks/conll2003", None) if data_args.task_name else None
    download_options = model_args.download_options()
    if data_args.dataset_name is None:
        download_options["revision"] = "refs/convert/parquet"  # the main branch is a script, which datasets refuses
    splits = read_splits(data_args, hub, read_file, download_options)
    args.drop_missing_splits(splits)
    args.row_hashes = hash_rows(splits, data_args.label_column_name)
    sentences = {
        split: read_sentences(rows, split, data_args)
        for split, rows in splits.items()
        if split != "train" or args.do_train
    }
    if args.do_train:
        with input_errors(source_of(splits["train"], "train")):
            labels = tuple(ner.label_names(sentences["train"]))
    else:
        labels = checkpoint_labels(model_args) or ()
    if not labels:
        raise InputError(f"{model_args.checkpoint} is a regression model, it has no labels")
    labels = labels_in_checkpoint_order(labels, model_args)
    for split, split_sentences in sentences.items():
        with input_errors(source_of(splits[split], split)):
            ner.require_known_labels(split_sentences, labels, split)
        words = sum(len(sentence.words) for sentence in split_sentences)
        logger.warning(f"{split}: {len(split_sentences):,} sentences, {words:,} words")
    marked = all(sentence.document is not None for group in sentences.values() for sentence in group)
    if not (marked or args.do_train or data_args.document_context in (None, "none")):
        logger.warning(
            f"--document_context {data_args.document_context} needs documents, and some rows have none: using none."
        )
        data_args.document_context = "none"
    if data_args.document_context is None:
        data_args.document_context = "merged" if marked and data_args.task_name == "conll2003" else "none"
        model_args.input_flags["document_context"] = data_args.document_context
    logger.warning(f"Labels: {', '.join(labels)}. Document context: {data_args.document_context}.")
    args.set_best_metric(ner.metric_names(labels, data_args.return_entity_level_metrics))

    # 2. Training, evaluation and predictions, once per seed
    over_seeds(
        args,
        lambda seed_args: run(model_args, data_args, sift_args, seed_args, labels, sentences),
        ensemble_task(data_args, args, sentences),
    )


def ensemble_task(
    data_args: NerArguments, args: FineTuningArguments, sentences: dict[str, list[Sentence]]
) -> EnsembleTask:
    """How to score and write the tags of an ensemble."""

    def metrics(split: str, scores: Scores) -> dict[str, float] | None:
        if sentences[split][0].tags is None:
            return None
        return score_tags(ner.tags_of_scores(scores, sentences[split]), sentences[split], data_args)

    def write(folder: Path, split: str, scores: Scores) -> None:
        tags = ner.tags_of_scores(scores, sentences[split])
        ner.write_conll_predictions(folder / f"predictions_{split}.txt", sentences[split], tags)

    words = {split: [word for sentence in group for word in sentence.words] for split, group in sentences.items()}
    return EnsembleTask(scored_splits(words, args), metrics, write, args.row_hashes)


def score_tags(tags: list[list[str]], sentences: list[Sentence], data_args: NerArguments) -> dict[str, float]:
    gold, by_type = [sentence.tags or [] for sentence in sentences], data_args.return_entity_level_metrics
    return compute_metric("named_entities", predictions=tags, references=gold, by_type=by_type)


def read_file(file: str) -> Dataset:
    """Rows of a table, or the sentences of a CoNLL file as rows with the same columns."""
    path = Path(file)
    if Path(path.name.removesuffix(".gz")).suffix.lower() in TABLE_SUFFIXES:
        return read_table(file)
    sentences = ner.read_conll(path)
    columns: dict[str, list] = {
        "tokens": [sentence.words for sentence in sentences],
        "document_id": [sentence.document for sentence in sentences],
    }
    if sentences[0].tags is not None:
        columns["ner_tags"] = [sentence.tags for sentence in sentences]
    return Dataset.from_dict(columns)


def read_sentences(rows: Dataset, split: str, data_args: NerArguments) -> list[Sentence]:
    """Sentences with IOB2 tags; test sentences may have none."""
    words, tags, is_test = data_args.text_column_name, data_args.label_column_name, split.startswith("test")
    labelled = tags in rows.column_names
    with input_errors(source_of(rows, split)):
        if not labelled and not is_test and rows.column_names == ["tokens", "document_id"]:  # a CoNLL file
            raise InputError(f"the {split} file has no labels: each line needs a word and its label, as in 'EU B-ORG'")
        require_columns(rows, [words] if is_test else [words, tags], split)
        if labelled and is_test and all(row_tags is None for row_tags in rows[tags]):
            labelled = False
        names = getattr(getattr(rows.features[tags], "feature", None), "names", None) if labelled else None
        return ner.convert_to_iob2(ner.sentences_from_table(rows, words, tags if labelled else None, names))


def run(
    model_args: ModelArguments,
    data_args: NerArguments,
    sift_args: SiftArguments,
    args: FineTuningArguments,
    labels: tuple[str, ...],
    sentences: dict[str, list[Sentence]],
) -> dict[str, float]:
    # 1. Tokenizer and model
    set_seed(args.seed)
    tokenizer = load_tokenizer(model_args, add_prefix_space=True)
    fields = label_fields(labels)
    if data_args.token_classifier is not None:
        fields["token_classifier"] = data_args.token_classifier
    model = load_model(
        model_args,
        HfDebertaForTokenClassification,
        AutoModelForTokenClassification,
        do_train=args.do_train,
        **fields,
    )

    # 2. Windows of words as model inputs
    length = max_input_length(data_args.max_seq_length, tokenizer, model.config)
    with args.main_process_first(desc="tokenizing"):
        inputs = {
            split: encode_windows(split_sentences, split, tokenizer, labels, length, data_args)
            for split, split_sentences in sentences.items()
        }

    def compute_metrics(split: str, prediction: EvalPrediction) -> dict[str, float]:
        best = logits_of(prediction.predictions)[..., 0]
        tags = ner.predicted_tags(best, inputs[split], sentences[split], labels)
        return score_tags(tags, sentences[split], data_args)

    # 3. Training and evaluation
    trainer = FineTuningTrainer(
        model=model,
        args=args,
        sift=sift_args,
        splits=inputs,
        metrics=compute_metrics,
        scores=lambda split, predictions: ner.word_scores(
            predictions[0], predictions[1], inputs[split], sentences[split], labels
        ),
        preprocess_logits_for_metrics=best_labels,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer, **data_args.padding_options(length, args)),
        card_fields=data_args.card_fields(model_args.checkpoint, model_args.demo),
    )
    metrics = train_and_evaluate(trainer)

    # 4. Predictions for the test sentences, and their metrics if they have labels
    if args.do_predict:
        for split in prediction_splits(inputs):
            prefix = split.replace("test", "predict", 1)
            predicted = trainer.predict_split(split, prefix)
            if "labels" in inputs[split].column_names:
                save_prediction_metrics(trainer, prefix, predicted.metrics)
            if trainer.is_world_process_zero():
                best = logits_of(predicted.predictions)[..., 0]
                tags = ner.predicted_tags(best, inputs[split], sentences[split], labels)
                ner.write_conll_predictions(args.output_folder / f"predictions_{split}.txt", sentences[split], tags)
    write_card_and_push(trainer)
    return metrics


def encode_windows(
    sentences: list[Sentence],
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    labels: tuple[str, ...],
    length: int,
    data_args: NerArguments,
) -> Dataset:
    """Model inputs of at most `length` tokens."""
    context = data_args.document_context or "none"
    rows = Dataset.from_list(list(ner.group_sentences(sentences, context)))

    def encode_batch(batch: dict[str, list]) -> dict[str, list]:
        return ner.encode_sentences(batch, tokenizer, labels, length, context, data_args.label_all_tokens)

    options = data_args.map_options(f"tokenizing {split}")
    inputs = rows.map(encode_batch, remove_columns=rows.column_names, **options)
    partial = sum(inputs["is_partial"])
    if partial:
        logger.warning(f"{split}: sentences longer than --max_seq_length {length} were split into {partial:,} windows")
    return inputs


def best_labels(logits: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The best labels of each token [B, N, k] and their probabilities, which need less memory than all logits."""
    probabilities = logits_of(logits).float().softmax(-1)
    best = probabilities.topk(min(ner.SCORED_LABELS, probabilities.shape[-1]))
    return best.indices, best.values


if __name__ == "__main__":
    main()
