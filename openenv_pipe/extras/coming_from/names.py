"""What other trainers (TRL, verl, prime-rl, ART) call the keys here, for messages about them."""

from collections.abc import Mapping

# By the last part of the other name; one that ends the name of a key here is left out.
OTHER_NAMES: Mapping[str, str] = {
    # TRL
    "num_generations": "trainer.group_size",
    "generation_batch_size": "trainer.tasks_per_step",
    "per_device_train_batch_size": "trainer.tokens_per_batch",
    "learning_rate": "trainer.optimizer.lr",
    "lr_scheduler_type": "trainer.optimizer.schedule",
    "warmup_steps": "trainer.optimizer.lr_warmup_steps",
    "warmup_ratio": "trainer.optimizer.lr_warmup_steps",
    "importance_sampling_level": "trainer.loss.type",
    "beta": "trainer.loss.kl.coef",
    "epsilon": "trainer.loss.clip_low",
    "epsilon_high": "trainer.loss.clip_high",
    "delta": "trainer.loss.max_ratio",
    "loss_type": "trainer.loss.type",
    "mask_truncated_completions": "trainer.loss.mask_truncated",
    "off_policy_mask_threshold": "trainer.loss.off_policy_limit",
    "scale_rewards": "trainer.advantage.scale",
    "num_iterations": "trainer.passes_per_step",
    "max_completion_length": "env.max_reply_tokens",
    "max_tool_calling_iterations": "env.max_turns",
    "max_steps": "trainer.steps",
    "save_steps": "trainer.checkpoint.every",
    "save_total_limit": "trainer.checkpoint.keep_last",
    "eval_steps": "eval.during.every",
    "num_generations_eval": "eval.samples_per_task",
    "report_to": "tracker",
    "use_bias_correction_kl": "trainer.loss.kl.importance_weights",
    "sync_ref_model": "trainer.loss.kl.refresh_every",
    "ref_model_sync_steps": "trainer.loss.kl.refresh_every",
    "teacher_model_name_or_path": "trainer.loss.kl.reference",
    "router_aux_loss_coef": "trainer.loss.router_aux_coef",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_share",
    "vllm_importance_sampling_correction": "trainer.loss.correction.type",
    "gradient_checkpointing": "model.activation_checkpointing",
    "model_name_or_path": "model.path",
    # verl
    "train_batch_size": "trainer.tasks_per_step",
    "ppo_max_token_len_per_gpu": "trainer.tokens_per_batch",
    "ppo_epochs": "trainer.passes_per_step",
    "clip_ratio_low": "trainer.loss.clip_low",
    "clip_ratio_high": "trainer.loss.clip_high",
    "kl_loss_coef": "trainer.loss.kl.coef",
    "kl_loss_type": "trainer.loss.kl.estimator",
    "entropy_coeff": "trainer.loss.entropy_coef",
    "clip_grad": "trainer.optimizer.max_grad_norm",
    "max_num_gen_batches": "trainer.max_sampling_rounds",
    "max_response_length": "env.max_reply_tokens",
    "max_assistant_turns": "env.max_turns",
    "max_tool_response_length": "env.max_observation_tokens",
    "total_training_steps": "trainer.steps",
    "save_freq": "trainer.checkpoint.every",
    "test_freq": "eval.during.every",
    "staleness_threshold": "trainer.max_staleness",
    "enable_gradient_checkpointing": "model.activation_checkpointing",
    "loss_mode": "trainer.loss.type",
    # prime-rl and ART
    "rollouts_per_example": "trainer.group_size",
    "max_async_level": "trainer.max_staleness",
    "max_off_policy_steps": "trainer.max_staleness",
    "kl_penalty_coef": "trainer.loss.kl.coef",
    "base_model": "model.path",
    "packed_sequence_length": "trainer.tokens_per_batch",
    "truncated_importance_sampling": "trainer.loss.correction.high",
}

# What differs although the key is the nearest one.
NOTES: Mapping[str, str] = {
    "warmup_ratio": "in steps of the optimizer, not as a share",
    "importance_sampling_level": "gspo has one ratio for each sample, TRL's sequence",
    "truncated_importance_sampling": "with trainer.loss.correction.type=truncate",
    "per_device_train_batch_size": "in tokens, not rows",
    "max_completion_length": "for each reply; env.max_episode_tokens limits all replies of an "
    "episode, with its prompts and observations",
}

# TRL's loss_type by our keys, and what else a preset of that name changes in trainer=grpo. None: it
# has no equivalent here.
LOSS_TYPES: Mapping[str, str | None] = {
    "grpo": "trainer=grpo",
    "dr_grpo": "trainer=grpo trainer.loss.normalise=constant; trainer=dr_grpo also has "
    "trainer.advantage.scale=none, TRL's scale_rewards=False",
    "dapo": "trainer=grpo trainer.loss.normalise=token; trainer=dapo also has "
    "trainer.loss.clip_high=0.28, trainer.max_sampling_rounds=3 and "
    "trainer.loss.normalise_groups=with_signal",
    "bnpo": "trainer=grpo trainer.loss.normalise=token, over the tokens of an update",
    "cispo": "trainer=cispo, with trainer.loss.clip_high=4.0, TRL's epsilon_high=5",
    "sapo": "trainer=sapo",
    "luspo": None,
    "vespo": None,
}

EPOCHS = (
    "only steps are counted: trainer.steps = epochs * tasks of training / trainer.tasks_per_step"
)
# Why there is no such key, and what to do instead.
NOT_HERE: Mapping[str, str] = {
    "reward_funcs": "a function is a term of the reward, reward.terms.NAME, and gets one episode: "
    "docs/coming_from.md",
    "reward_weights": "each term has its own: reward.terms.NAME.weight",
    "gradient_accumulation_steps": "a step has trainer.tasks_per_step * trainer.group_size "
    "episodes, and trainer.tokens_per_batch of their tokens are computed at a time",
    "max_prompt_length": "prompts have no limit of their own: env.max_episode_tokens limits them "
    "together with the replies, and env.max_observation_tokens cuts observations",
    "num_train_epochs": EPOCHS,
    "total_epochs": EPOCHS,
}
