"""Plugins for the engines that people serve and train with: vLLM, SGLang, torchtitan.

`adapters` computes calls of engines by refold's operators. A file per engine puts the adapters where the engine looks
for them. Nothing here imports an engine before its plugin is switched on. docs/engines.md is the page for users.
"""
