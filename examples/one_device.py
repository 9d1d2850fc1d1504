"""Train a small network to tell stripes in four directions apart."""

import torch
from own_dataset import stripes
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = nn.Sequential(nn.Flatten(), nn.Linear(400, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
dataset = TensorDataset(*stripes("", train=True))
loader = DataLoader(dataset, batch_size=64, shuffle=True)
for epoch in range(3):
    for images, labels in loader:
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
torch.save(model.state_dict(), "model.pt")
