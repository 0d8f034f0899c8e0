"""Step 1 of docs/tutorial.md: one process."""

import time

import torch
from shapes import Net, accuracy, make_data
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
torch.set_num_threads(1)
train_data, test_data = make_data()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
loader = DataLoader(train_data, batch_size=64, shuffle=True)
for epoch in range(3):
    start = time.perf_counter()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    ms = 1000 * (time.perf_counter() - start) / len(loader)
    print(f"epoch {epoch}: accuracy {accuracy(model, test_data):.2f}, {ms:.1f} ms per step")
