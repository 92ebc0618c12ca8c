"""The data of a run: the journey documents -> encoding -> store -> packing -> batch -> loader.

files/                  which files a path of a data flag names: folders, patterns, the hub, compressed
first_records.py        kinds of the first records of each file, without torch
corpus/                 raw files become tokens on disk, once
records/                which keys of a record are read, and the texts, conversations and pairs they become
quarantine.py           bad records: counted, listed with their place, and skipped up to a limit
workers.py              the end of worker processes
progress_lines.py       lines on how much is done while files are tokenised and packed
tags.py                 tags of documents and packs, and the teachers that a micro-batch needs
packing/                documents to pieces, pieces to packs: once for a corpus
order.py, dataset.py    the pack of sample k of a run, and packs by number
batch.py                one pack (numpy) and one micro-batch of packs (torch)
teacher_input.py        the part of a batch that belongs to one teacher
measured_text.py        the beginnings of documents, to measure models on outside a run
loader.py               the micro-batches of one rank for training and for evaluation
prompt_readers.py       prompts as each model reads them
prompts.py              prompts for the student to complete
build.py                the data sets of a run from its data flags, cross-tokenizer teachers included
chat_roles.py           roles of tokens, by the text with which a template begins a message
pack_view.py            packs for people: as text, and with their images as one picture
aligned/                the same corpus in the tokens of a cross-tokenizer teacher, with the aligned chunks
images/                 images of conversations: tokens, tables, packs, pixels
stored/                 the top-k predictions of a teacher that ran earlier
"""
