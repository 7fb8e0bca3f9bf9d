"""`stoker train TASK`: fine-tunes a model. This file contains the short help; the options are Hugging Face's own."""

from __future__ import annotations

import importlib

from stoker import streams
from stoker.cli.task_names import announce_loading, require_task, require_task_installed, task_and_options
from stoker.errors import UserError, one_line
from stoker.tasks import early_checks

__all__ = ["main"]

_OVERVIEW = """usage: stoker train TASK [options]
       stoker train TASK RECIPE [options]

Fine-tunes a model, evaluates it, and writes it with a report of the run. Tasks:
  qa         answer questions from texts (SQuAD 1.1 and 2.0)
  classify   classify texts or pairs of texts, or predict a number for them (GLUE)
  fewshot    classify texts, from eight examples of each class or as few as you have (SetFit)
  ner        find named entities in texts (CoNLL columns, spans)
  mlm        continue the pre-training of a model on your own texts, by masked words
  sft        fine-tune a language model on chats, instructions, texts or preference pairs
  embed      train an embedding model on pairs, triplets, pairs with scores, or labelled texts
  rerank     train a cross-encoder that scores or classifies pairs of texts

A recipe is a YAML or JSON file of options; every run writes the one that repeats it, DIR/recipe.yaml.
`stoker train TASK --help` lists the common options, --help-all every one."""

_WHAT = """  --do_train, --do_eval, --do_predict   train, evaluate, predict the test file
"""
_COMMON = f"""
What to do:
{_WHAT}  --output_dir DIR                folder for model, checkpoints, metrics and report

Model:
  --model_name_or_path NAME       a folder, or the name of a model on the hub; or --model
  --bf16                          bf16 activations with fp32 weights, on any CPU
  --no_ipex                       do not optimize the model: stock speed, for comparison

Training:
  --num_train_epochs 3, --max_steps N, --learning_rate 5e-5, --warmup_steps 0, --seed 42
  --per_device_train_batch_size 8 rows per batch; or --tokens_per_batch N; --gradient_accumulation_steps 1
  --save_steps 500, --save_total_limit N, --eval_strategy steps|epoch, --eval_steps N, --logging_steps N
  --overwrite_output_dir          start over; without it, an interrupted run resumes, and another one is refused
  --resume_from_checkpoint DIR    resume from this one
  --report_to tensorboard         or another integration of transformers
  --live                          show the run in the browser while it trains (--live_port N)
  --push_to_hub                   publish the result

Several processes (stoker launch -n 4 -m stoker train TASK ...):
  --ddp_backend ccl               shared memory within a machine
  --gradient_compression bf16     half the bytes between machines
  --local_sgd K                   average weights every K steps, for slow networks
"""

_HELP = {
    "qa": """usage: stoker train qa --model_name_or_path MODEL --train_file FILE --output_dir DIR --do_train [options]

Fine-tunes a model to answer questions from texts. The flags are those of Hugging Face's run_qa.py.

Data (SQuAD JSON nested or flat, JSON lines, CSV, Parquet; .gz too):
  --train_file, --validation_file, --test_file FILE
  --dataset_name squad            or a data set on the hub
  --version_2_with_negative       some questions have no answer (SQuAD 2.0)
  --max_seq_length 384            maximum tokens of question and text together
  --doc_stride 128                tokens by which windows over long texts overlap
  --max_train_samples, --max_eval_samples N
  --strict                        stop at the first row that cannot be used
"""
    + _COMMON
    + """
example:
  stoker train qa --model_name_or_path bert-base-uncased --train_file train-v1.1.json --validation_file dev-v1.1.json \\
    --do_train --do_eval --per_device_train_batch_size 12 --learning_rate 3e-5 --num_train_epochs 2 --output_dir out/squad

--help-all lists every option.""",
    "classify": """usage: stoker train classify --model_name_or_path MODEL --train_file FILE --output_dir DIR --do_train [options]

Fine-tunes a model to classify texts or pairs of texts. The flags are those of Hugging Face's run_glue.py.

Data (TSV, CSV, JSON, JSON lines, Parquet; .gz too):
  --train_file, --validation_file, --test_file FILE
  --task_name mrpc                a GLUE task: its columns and metrics, and its data unless files are given
  --dataset_name NAME             or a data set on the hub
  --text_column_names A,B         the columns with one or two texts (default: guessed by name)
  --label_column_name C
  --do_regression                 the label is a number
  --metric_name accuracy,f1
  --max_seq_length 128
  --max_train_samples, --max_eval_samples N
  --strict                        stop at the first row that cannot be used
"""
    + _COMMON
    + """
example:
  stoker train classify --model_name_or_path bert-base-uncased --task_name mrpc --train_file train.tsv \\
    --validation_file dev.tsv --do_train --do_eval --per_device_train_batch_size 16 --learning_rate 2e-5 --output_dir out/mrpc

--help-all lists every option.""",
    "fewshot": """usage: stoker train fewshot --model_name_or_path MODEL --train_file FILE --output_dir DIR [options]

Trains a classifier of texts on a few examples of each class, in minutes, by SetFit's method (pip install 'stoker[fewshot]'): an
embedding model is trained on pairs of the examples, then a linear classifier on its embeddings.

Data (TSV, CSV, JSON, JSON lines, Parquet; .gz too), a row per text:
  --train_file, --validation_file, --test_file FILE; --dataset_name NAME on the hub
  --examples_per_class 8          how many are used, drawn with --seed from a file that may have more
  --text_column_names A           the column with the text (default: guessed by name)
  --label_column_name B           the column with the class
  --sampling_strategy oversampling   or undersampling, unique: which pairs are made
  --num_iterations N              make 2 N pairs for each example instead, for many classes
  --max_train_samples, --max_eval_samples N; --strict stops at the first row that cannot be used

Model:
  --model_name_or_path NAME       a folder, or the name of a model on the hub: a SentenceTransformer, or any encoder; or --model
  --max_seq_length N              maximum tokens of a text (default: the model's own)
  --bf16                          bf16 activations with fp32 weights, on any CPU

Training:
  --num_train_epochs 1, --max_steps N, --learning_rate 2e-5, --warmup_steps 0.1, --weight_decay 0.01, --seed 42
  --per_device_train_batch_size 16   pairs per batch; or --tokens_per_batch N
  --do_predict                    predict the test file
  --save_steps 500, --save_total_limit N, --eval_strategy steps|epoch, --eval_steps N, --logging_steps N
  --samples 3                     examples in the report, before and after training
  --live                          show the run in the browser while it trains (--live_port N)
  --overwrite_output_dir          start over; without it, an interrupted run resumes, and another one is refused
  --push_to_hub                   publish the result; several processes: stoker launch -n 4 -m stoker train fewshot ...

example:
  stoker train fewshot --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --train_file train.csv \\
    --validation_file dev.csv --output_dir out/fewshot
  stoker use --model out/fewshot --text "The parcel never arrived."

--help-all lists every option.""",
    "ner": """usage: stoker train ner --model_name_or_path MODEL --train_file FILE --output_dir DIR --do_train [options]

Fine-tunes a model to find named entities. The flags are those of Hugging Face's run_ner.py.

Data (CoNLL columns: .conll, .txt, .tsv, ...; JSON lines, JSON, Parquet with tokens and tags, or text and entities; .gz too):
  --train_file, --validation_file, --test_file FILE
  --dataset_name NAME             or a data set on the hub
  --text_column_name A            the column with words or text (default: by name; in CoNLL files a number, default the first)
  --label_column_name B           the column with tags or entities (default: by name; in CoNLL files a number, default the last)
  --max_seq_length 512            longer texts are divided into windows, which overlap by --doc_stride 64 tokens
  --label_all_tokens              train on all tokens of a word instead of its first
  --return_entity_level_metrics   scores of each type in the metrics, too
  --max_train_samples, --max_eval_samples N
  --strict                        stop at the first row that cannot be used
"""
    + _COMMON
    + """
example:
  stoker train ner --model_name_or_path bert-base-cased --train_file train.conll --validation_file dev.conll \\
    --do_train --do_eval --per_device_train_batch_size 16 --learning_rate 5e-5 --output_dir out/entities

--help-all lists every option.""",
    "mlm": """usage: stoker train mlm --model_name_or_path MODEL --train_file FILE... --output_dir DIR --do_train [options]

Continues the pre-training of a model on your own texts, by masked words. The flags are those of Hugging Face's run_mlm.py.

Data (text files of any size, JSON lines, JSON, CSV, Parquet with a column of texts; .gz too):
  --train_file, --validation_file FILE...   one or several, or patterns such as 'texts/*.txt'
  --validation_split_percentage 5 of the rows, if there is no --validation_file
  --dataset_name NAME             or a data set on the hub
  --text_column_name text
  --line_by_line                  a row per line; without it, lines are joined and divided into rows of --max_seq_length
  --max_seq_length 512
  --masking tokens|words|spans    what is masked: single tokens, whole words, or several words in a row
  --mlm_probability 0.15          the share of tokens
  --max_train_samples, --max_eval_samples N
  --strict                        stop at the first row that cannot be used
"""
    + _COMMON.replace(_WHAT, "  --do_train, --do_eval           train, evaluate\n")
    + """
example:
  stoker train mlm --model_name_or_path bert-base-uncased --train_file 'reports/*.txt' --do_train --do_eval \\
    --masking words --per_device_train_batch_size 16 --num_train_epochs 1 --output_dir out/reports

--help-all lists every option.""",
    "sft": """usage: stoker train sft --model MODEL --train_file FILE [--output_dir DIR] [options]

Fine-tunes a language model: a LoRA adapter, or all weights. Built on TRL and PEFT (pip install 'stoker[sft]').

Data (JSON, JSON lines, CSV, Parquet, text; .gz too). Its columns tell the format: messages (OpenAI), conversations
(ShareGPT), prompt and completion, instruction, input and output (Alpaca), text; chosen and rejected with --dpo:
  --train_file, --validation_file FILE
  --dataset_name NAME             or a data set on the hub
  --loss_on completions|assistant|all   what is trained on: the last answer, every answer, or all tokens
                                  (default: assistant for chats, completions for prompts and instructions)
  --max_length 1024               maximum tokens of a row; --packing (not with --dpo) fills rows up to it with several texts
  --max_train_samples, --max_eval_samples N
  --strict                        stop at the first row that cannot be used

Model:
  --model NAME                    a folder, a GGUF file, or the name of a model on the hub
  --output_dir out/chat           folder for the result; without it, out/ and the name of the data
  --lora_r 16, --lora_alpha 32, --lora_dropout 0
  --lora_targets auto             or all-linear, or names of layers separated by commas
  --full                          train all weights instead of an adapter
  --frozen_weights nf4            store the weights that an adapter leaves as they are in fewer bits (bfloat16, int8, nf4)
  --merge                         also write the model with the adapter merged into it, to DIR/merged
  --dpo                           train on preference pairs; --beta 0.1
  --bf16                          bf16 activations with fp32 weights, on any CPU

Training:
  --num_train_epochs 3            or --max_steps N
  --learning_rate 2e-4            2e-5 with --full; 1e-5 and 1e-6 with --dpo
  --per_device_train_batch_size 8 rows per batch; or --tokens_per_batch N
  --gradient_accumulation_steps 1, --seed 42
  --samples 3                     answers in the report, before and after training
  --save_steps 500, --save_total_limit N, --eval_strategy steps|epoch, --eval_steps N, --logging_steps N
  --live                          show the run in the browser while it trains (--live_port N)
  --overwrite_output_dir          start over; without it, an interrupted run resumes, and another one is refused
  --push_to_hub                   publish the result; several processes: stoker launch -n 4 -m stoker train sft ...

example:
  stoker train sft --model HuggingFaceTB/SmolLM2-135M-Instruct --train_file chat.jsonl
  stoker chat --model out/chat

--help-all lists every option.""",
    "embed": """usage: stoker train embed --model_name_or_path MODEL --train_file FILE --output_dir DIR [options]

Trains an embedding model. Built on sentence-transformers (pip install 'stoker[embed]').

Data (JSON, JSON lines, CSV, TSV, Parquet; .gz too). Its columns tell the kind, and the loss follows:
  pairs (anchor, positive; query, passage; question, answer; ...)    MultipleNegativesRankingLoss
  triplets (the same and negative, or negative_1, negative_2, ...)   MultipleNegativesRankingLoss
  pairs with scores (sentence1, sentence2, score)                    CoSENTLoss
  labelled texts (text, label)                                       BatchAllTripletLoss
  --train_file, --validation_file FILE; --dataset_name NAME on the hub
  --text_column_names A,B,...     the columns of texts in this order; --label_column_name C: of score or class
  --column_names A,B,...          names of the columns, if the first line of a CSV or TSV file is a row
  --corpus_file FILE              further texts to search in, for evaluation and for negatives
  --mine_negatives N              add N hard negatives to each pair; --mining_margin 0.05, --mining_skip 0
  --max_train_samples, --max_eval_samples N; --strict stops at the first row that cannot be used

Model:
  --model_name_or_path NAME       a folder, or the name of a model on the hub: a SentenceTransformer, or any encoder; or --model
  --max_seq_length N              maximum tokens of a text (default: the model's own)
  --query_prompt, --document_prompt TEXT   put before the texts of pairs and triplets
  --bf16                          bf16 activations with fp32 weights, on any CPU

Training:
  --loss NAME                     another loss, such as CachedMultipleNegativesRankingLoss, CosineSimilarityLoss, TripletLoss
  --loss_kwargs JSON              its arguments; --mini_batch_size 32 of Cached losses
  --matryoshka_dims 256,128,64    embeddings that can be cut to these dimensions
  --gather_across_devices         negatives from all processes
  --num_train_epochs 3, --max_steps N, --learning_rate 2e-5, --warmup_steps 0.1, --seed 42
  --per_device_train_batch_size   64 where the other rows of a batch are negatives, else 16
  --save_steps 500, --save_total_limit N, --eval_strategy steps|epoch, --eval_steps N, --logging_steps N
  --live                          show the run in the browser while it trains (--live_port N)
  --samples 3                     examples in the report, before and after training
  --overwrite_output_dir          start over; without it, an interrupted run resumes, and another one is refused
  --push_to_hub                   publish the result; several processes: stoker launch -n 4 -m stoker train embed ...

example:
  stoker train embed --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --train_file pairs.jsonl \\
    --validation_file dev.jsonl --output_dir out/embed

--help-all lists every option.""",
    "rerank": """usage: stoker train rerank --model_name_or_path MODEL --train_file FILE --output_dir DIR [options]

Trains a cross-encoder, which reads two texts together: a reranker, or a classifier of pairs. Built on sentence-transformers
(pip install 'stoker[embed]').

Data (JSON, JSON lines, CSV, TSV, Parquet; .gz too). Its columns tell the kind, and the loss follows:
  pairs with scores (query, document, score; or documents and scores as lists)   BinaryCrossEntropyLoss
  triplets (query, positive, negative, or negative_1, negative_2, ...)           BinaryCrossEntropyLoss
  pairs (query, positive): documents of other rows are the negatives             MultipleNegativesRankingLoss
  pairs with classes (premise, hypothesis, label)                                CrossEntropyLoss
  --train_file, --validation_file, --test_file FILE; --dataset_name NAME on the hub
  --text_column_names A,B,...     the columns of texts in this order; --label_column_name C: of score or class
  --column_names A,B,...          names of the columns, if the first line of a CSV or TSV file is a row
  --mine_negatives N              add N hard negatives to each pair, found by the embedding model --mining_model NAME
  --corpus_file FILE              further texts to search in; --mining_margin 0.05, --mining_skip 0
  --max_train_samples, --max_eval_samples N; --strict stops at the first row that cannot be used

Model:
  --model_name_or_path NAME       a folder, or the name of a model on the hub: a cross-encoder, or any encoder; or --model
  --max_seq_length N              maximum tokens of both texts (default: the model's own)
  --bf16                          bf16 activations with fp32 weights, on any CPU

Training:
  --loss NAME                     another loss, such as LambdaLoss, ListNetLoss, RankNetLoss, MSELoss
  --loss_kwargs JSON              its arguments; --mini_batch_size 32 of Cached losses
  --do_predict                    score the pairs of the test file
  --num_train_epochs 3, --max_steps N, --learning_rate 2e-5, --warmup_steps 0.1, --seed 42
  --per_device_train_batch_size   64 where the other rows of a batch are negatives, else 16; or --tokens_per_batch N
  --save_steps 500, --save_total_limit N, --eval_strategy steps|epoch, --eval_steps N, --logging_steps N
  --live                          show the run in the browser while it trains (--live_port N)
  --samples 3                     examples in the report, before and after training
  --overwrite_output_dir          start over; without it, an interrupted run resumes, and another one is refused
  --push_to_hub                   publish the result; several processes: stoker launch -n 4 -m stoker train rerank ...

example:
  stoker train rerank --model_name_or_path microsoft/MiniLM-L12-H384-uncased --train_file pairs.jsonl --output_dir out/rerank \\
    --mine_negatives 4 --mining_model sentence-transformers/all-MiniLM-L6-v2

--help-all lists every option.""",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in {"-h", "--help"}:
        print(_OVERVIEW)
        return 0
    task, rest = task_and_options("train", argv)
    if not rest or "-h" in rest or "--help" in rest:
        print(_HELP[task])
        return 0
    require_task_installed("train", task)
    if "--help-all" in rest:
        require_task("train", task)
        return _all_help(task, rest)
    early_checks.check(task, rest)
    announce_loading(rest)
    streams.keep_running()
    require_task("train", task)
    from stoker.tasks.loading import quiet

    quiet()  # before the modules of the task, whose imports print, too
    run = importlib.import_module(f"stoker.tasks.{task}.fine_tune").main
    try:
        return int(run(rest))
    except ImportError as error:  # a package that some option needs, imported when training starts
        raise UserError(f"stoker train {task}: {one_line(error)}") from None


def _all_help(task: str, argv: list[str]) -> int:
    from stoker.tasks.option_parser import OptionParser

    module = importlib.import_module(f"stoker.tasks.{task}.fine_tune")
    options = getattr(module, f"{task.capitalize()}Options")
    arguments = {"arguments": module.arguments_of(argv)} if hasattr(module, "arguments_of") else {}
    OptionParser(f"train {task}", options, **arguments).print_help()
    return 0
