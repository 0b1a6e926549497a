"""The real engine: SGLang's schedulers as rank processes, driven token ids in, token ids out.

`engine.SglangEngine` with `settings.SglangSettings`; `models` makes small models. Nothing is imported here: SGLang
loads `plugin.activate` in each of its processes, a stock server's too.
"""
