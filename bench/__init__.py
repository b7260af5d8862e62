r"""Measuring: a load generator for any OpenAI-compatible server, the router alone, and servers side by side.

=============  ==================================================================================="""
