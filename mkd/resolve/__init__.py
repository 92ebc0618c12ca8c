"""The run that files and flags describe, before processes communicate.

model_source.py         the files of one model
preflight.py            problems of tokenizers, data and exports
data_check.py           all records of a run, read without training
image_reader.py         the image processors of models
chat_setup.py           the settings of a run for conversations
teacher_setup.py        one teacher, from its files to its term of the loss
trained_ends.py         the tokens that end the training texts, for exports
run_plan.py             the record of a run that can start
"""
