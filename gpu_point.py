import sys, json, torch, itertools, statistics
import refold.ops, triton
LSV=[(8,128,1,32)]
from gpu1 import time_ms, normal
from refold.ops.causal_conv1d import _triton as CC
from refold.ops.gated_rmsnorm import _triton as RN
from refold.ops.linear_scan import _triton as LS
from refold.ops.selective_scan import _triton as SF
bf=torch.bfloat16
def rate():
    a=torch.empty(1<<32,dtype=torch.uint8,device='cuda'); b=torch.empty_like(a); return 2**33/time_ms(lambda: b.copy_(a))/1e9
R=rate(); print('copy TB/s',R)
def rep(name, run, moved, **kw):
    try:
        ms=time_ms(run); print(name,kw,'ms %.4f'%ms,'share %.3f'%(moved/ms/1e9/R),flush=True)
    except Exception as e: print(name,kw,'ERR',repr(e)[:300],flush=True)

def plan(f, order, **kw):
    p=f.plan(needs=frozenset(),**kw); return lambda: p(*[kw[n] for n in order])
x,dy=(normal(8,4096,5376,dtype=bf) for _ in range(2)); w=normal(5376,4); bi=normal(5376)
moved=3*x.nbytes
for rows,bd,tiles,progs in [(12,64,16,32),(12,64,16,16),(12,64,8,32),(16,64,16,16),(10,64,16,32)]:
    CC.BACKWARD_ROWS,CC.BACKWARD_BLOCK_D,CC.BACKWARD_TILES,CC.BACKWARD_PROGRAMS=rows,bd,tiles,progs
    try: rep('conv',plan(CC.causal_conv1d_backward,'dy dstate x weight bias initial_state cu_seqlens'.split(),dy=dy,dstate=None,x=x,weight=w,bias=bi,initial_state=None,cu_seqlens=None,activation='silu'),moved,v=(rows,bd,tiles,progs))
    except Exception as e: print('conv',rows,repr(e)[:300])
del x,dy
x,z,dy=(normal(32768,5120,dtype=bf) for _ in range(3)); w=normal(5120)
old=RN._sizes
for warps,block,pw,RN.REGISTERS in [(4,1024,8,0),(4,1024,12,168),(8,1024,8,0),(8,2048,8,0),(8,1024,16,128),(4,2048,8,0),(2,1024,4,0)]:
    RN.PROGRAM_WARPS=pw; RN._sizes=lambda g: ({"ROWS":1,"BLOCK":block,"PARTS":triton.cdiv(g,block)},warps)
    try: rep('norm',plan(RN.gated_rmsnorm_backward,'dy x z weight'.split(),dy=dy,x=x,z=z,weight=w,eps=1e-5,group_size=None,norm_before_gate=False),5*x.nbytes,v=(warps,block,pw,RN.REGISTERS))
    except Exception as e: print('norm',warps,block,repr(e)[:300])
del x,z,dy
for b,t,d in ((1,2048,5120),(8,2048,5120)):
  a=torch.rand(b,t,d,device='cuda').to(bf); x,dy=(normal(b,t,d,dtype=bf) for _ in range(2))
  for tok,blk,wp,sl in LSV:
    LS.TOKENS,LS.BLOCK,LS.WARPS,LS.SLOTS=tok,blk,wp,sl
    try: rep('lscan',plan(LS.linear_scan_backward,'dh dstate a x initial_state cu_seqlens'.split(),dh=dy,dstate=None,a=a,x=x,initial_state=None,cu_seqlens=None,reverse=False),5*x.nbytes,shape=(b,t,d),v=(tok,blk,wp,sl))
    except Exception as e: print('ls',repr(e)[:300])
