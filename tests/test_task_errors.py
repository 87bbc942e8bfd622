"""Command lines of the tasks that are refused: one line of error, and no run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import assert_refused, command

# task | options | what the error says
REFUSED = """\
copy | --T 1000000000000000 | out of memory on cpu
copy | --schedule plateau --eval-every 0 | --schedule plateau with --eval-every 0: without evaluations
copy | --schedule cosine --lr-decay 1.5 | --lr-decay 1.5: with cosine it is the final factor of the rates; accepted
copy | --margin 1e-300 | spectrum_lr must be a rate that can be divided by the margin of 1e-300
copy | --T 5 --batch | --batch: expected one argument
copy | --T 5 --nonlinearity tahn | --nonlinearity: unknown nonlinearity 'tahn': did you mean 'tanh'?
copy | --T 5 --backend gpu | --backend: unknown backend 'gpu'
copy | --T 5 --device gpu | --device: 'gpu' is not a device
copy | --T 5 --hiden 64 | unknown option --hiden: did you mean --hidden?
copy | --T 5 --epochs 5 | unknown option --epochs: did you mean --iterations?
music | --data {ptb} --collection jsb | missing data file jsb_chorales.npz (nor JSB_Chorales.mat)
music | --data {ptb} --lr 1e-3 --lr-floor 0.01 | --lr 0.001: below --lr-floor, 0.01, at which training ends
copy | --T 5 10000 | unknown argument 10000; see --help
copy | --T 5 --rank 20 --hidden 16 | rank must be at most hidden_size = 16, got 20
copy | --T 5 --nonlinearity oplu --hidden 15 | hidden_size must be even for nonlinearity 'oplu'
adding | --T 5 --model rotation --hidden 15 | hidden_size must be even (pairs of units), got 15
adding | --T 5 --model rotation --gain 2 | --gain 2: only with --model factorized or rnn or exprnn or nnrnn, not
adding | --T 5 --model rotation --message-clip 1 | --message-clip 1: only with --model factorized or rnn or exprnn or
adding | --T 5 --model rotation --precision bf16 | --precision bf16: only with --model factorized or rnn or exprnn or
adding | --T 5 --model rnn --margin 0 | --margin 0: only with --model factorized or rotation, not rnn
adding | --T 5 --preset paper --model lstm --nonlinearity relu | --nonlinearity relu: only with --model factorized or
adding | --T 5 --model gru --learned-h0 | --learned-h0: only with --model factorized or rnn or exprnn or nnrnn or
adding | --T 5 --optimizer adam --alpha 0.9 | --alpha 0.9: only with --optimizer rmsprop or with --geodesic rmsprop, not
copy | --T 5 --model rotation --init identity | --init identity: only with --model factorized or rnn or lstm
copy | --T 5 --model lstm --max-angle 0.1 | --max-angle 0.1: only with --model factorized or rnn or exprnn or
adding | --T 5 --max-angle 0.1 | --max-angle 0.1: only with --init henaff or cayley or torus or with --model rotation
adding | --T 5 --model nnrnn --init cayley --max-angle 0.1 | --max-angle 0.1: only with --model factorized or rnn
copy | --T 5 --model lstm --last-step-gradient | --last-step-gradient: only with --model factorized or rnn or exprnn
copy | --T 5 --marker 9 | --marker 9: only with --input scalar, not onehot
copy | --T 5 --model rnn --geodesic-lr 0 | --geodesic-lr 0: only with --model factorized, not rnn
char_lm | --data {ptb} --model rnn --alpha 0.3 | --alpha 0.3: only with --optimizer rmsprop or with --geodesic rmsprop,
char_lm | --data {ptb} --bptt 9 --length 9 | --length 9: only without --bptt
pixel_mnist | --data {mnist} --permutation-seed 5 | --permutation-seed 5: only with --permuted
copy | --T 5 --schedule constant --patience 3 | --patience 3: only with --schedule plateau, not constant
copy | --T 5 --init glorot | init 'glorot' needs margin=None (its singular values are free in
copy | --T 5 --backend triton --hidden 16 | backend 'triton' cannot serve factored_scan
copy | --T 5 --algorithm modal --nonlinearity tanh | algorithm is 'modal': the activation is 'tanh'
copy | --T 5 --algorithm modal --message-clip 1 | algorithm is 'modal': with message_clip the recurrence runs
copy | --T 5 --algorithm modal --model lstm | --algorithm modal: not for --model lstm
adding | --T 10 --model rnn --spectrum-prior 1 | --spectrum-prior 1: only with --model factorized, not rnn
adding | --start silent --model lstm | --start silent: for --nonlinearity relu, --model factorized or rnn or
adding | --start silent --nonlinearity tanh | not tanh, factorized and 128
adding | --schedule inverse | --schedule inverse with --lr-decay 0: the rates never decrease; accepted: --lr-decay
adding | --last-step-gradient | --last-step-gradient: the task adding has no separate loss of its last time step
adding | --lr 1e39 | --lr: '1e39' is beyond 1e+30
adding | --model rnn --start silent --sigma 0.1 | --sigma 0.1 with --start silent: each sets all weights
adding | --batch 9007199254740992 | batch must be small enough for a tensor
adding | --T 10 --model exprnn --modulus-penalty 1 | --modulus-penalty 1: only with --model nnrnn, not exprnn
adding | --T 10 --model rnn --init torus | unknown init 'torus': accepted: orthogonal, henaff, cayley
adding | --T 10 --model exprnn --init glorot | unknown init 'glorot': accepted: henaff, cayley, torus
adding | --T 10 --model exprnn --soft-orthogonality 1 | --soft-orthogonality 1: only with --model factorized or rnn
pixel_mnist | --data {mnist} --model exprnn --rebase-every 5 --average 0.9 | --average with --rebase-every
adding | --hidden 10000000 | cannot hold u_l0 of shape [10000000, 10000000]
stacked_mnist | --data {mnist} --validation 60 --units 7 | hidden_size must be even
stacked_mnist | --data {mnist} --margin 1 | below 1
pixel_mnist |  | --data is needed: the folder with the four MNIST files
pixel_mnist | --data {mnist}/.. | has it
pixel_mnist | --data {mnist} --validation 260 | 260
pixel_mnist | --data {mnist} --validation 200 --batch 61 | --batch 61: there are 60 training images
pixel_mnist | --data {mnist} --pool 3 | --pool 3: images of 28 x 28 can be pooled by 1, 2, 4, 7 or 14
pixel_mnist | --data {mnist} --validation 60 --batch 20 --epochs 9007199254740992 | is not an integer from 1 to 1000000
char_lm | --data {mnist} | ptb.train.txt
char_lm | --data {ptb} --length 4 | no sentence of at most
char_lm | --data {ptb} --epochs 2 --iterations 3 | --epochs 2 and --iterations 3: give one of the two
char_lm | --data {ptb} --schedule exponential | --schedule exponential with --lr-decay 0: the rates never
char_lm | --data {ptb} --batch 60 --accumulate 3 | --accumulate 3: accepted: at most 2, the batches of an epoch
char_lm | --data {ptb} --batch 121 | --batch 121: there are 120 training sentences
char_lm | --data {short} --bptt 5 --batch 2 | the validation text has 6 characters; with --bptt it is read
char_lm | --data {ptb} --bptt 5 --batch 3000 | rows, the batch, must be at most
random_permutation | --init glorot-uniform | needs margin=None
random_permutation | --sigma 0.1 | --sigma 0.1: only with --model rnn, not factorized
deep_mnist | --data {mnist} --init orthogonal --sigma 0.1 | --sigma 0.1: only with --init normal or learned, not
deep_mnist | --data {mnist} --alpha 0.9 | --alpha 0.9: only with --optimizer rmsprop, not sgd
deep_mnist | --data {mnist} --validation 60 --backend cpu | unknown option --backend
"""


@pytest.mark.parametrize("row", REFUSED.splitlines())
def test_refused(row: str, tmp_path: Path, mnist: Path, ptb: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, options, message = row.split(" | ")
    short = tmp_path / "short"
    short.mkdir()
    for part in ("train", "valid", "test"):
        (short / f"ptb.{part}.txt").write_text(" a b c \n")
    given = options.format(mnist=mnist, ptb=ptb, short=short).split()
    assert_refused(capsys, message, command(task).main, *given, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists() or "triton" in options  # refused in the first iteration
