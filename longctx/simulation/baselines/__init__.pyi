from .loongserve import LoongServe as LoongServe
