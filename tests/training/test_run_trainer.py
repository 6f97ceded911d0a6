"""What a run says when it is stopped."""

import pytest
from tiny_trainers import classifier
from transformers import TrainerCallback


class StopAtStepThree(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("save_steps", "message"),
    [
        (2, "Stopped at step 3; the last checkpoint is step 2; repeat the command to resume"),
        (9, "Stopped at step 3, before the first checkpoint (--save_steps): the same command starts again"),
    ],
)
def test_ctrl_c_says_where_the_run_stopped(save_steps, message, tmp_path):
    run = classifier(tmp_path, max_steps=9, save_strategy="steps", save_steps=save_steps)
    run.add_callback(StopAtStepThree)
    with pytest.raises(KeyboardInterrupt) as stopped:
        run.train_or_resume()
    assert str(stopped.value) == message
