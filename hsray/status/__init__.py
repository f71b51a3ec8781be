"""How a run stands, from storage alone: `python -m hsray.status URL`, and what drivers leave for it.

`document` is what a driver says of itself, `recorder` its writer in the driver, `heads` and `survey` add up the
resolutions, `show` prints. Loads neither Ray, SGLang nor torch.
"""
